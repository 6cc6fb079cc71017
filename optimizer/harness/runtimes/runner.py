"""`Runner`: the interface of an open model or engine in any runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..contract import Contract
from ..inputs.batch import Array
from .decoder import Decoder
from .slots import Slots


class Runner(Protocol):
    """Interface of a model or engine that a runtime opened. OrtRunner is the reference
    implementation."""

    @property
    def model(self) -> Path:
        """Return the path of the file of the model or engine that the runtime runs."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Return the opened model's inputs, {name: element type}."""

    @property
    def outputs(self) -> list[str]:
        """Return the opened model's output names in graph order."""

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model or engine on a batch, and return its outputs by name. Raises InputError
        naming a missing, unknown or wrong input."""

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        """Return a decoder with an empty KV cache; see decoder.DecoderRunner."""

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        """Return slots for `rows` texts of up to `capacity` tokens; see slots.Slots."""

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        """Return the bytes of the engine's KV cache of one text of `tokens` tokens."""

    def close(self) -> None:
        """Close the model or engine and free its memory."""
