"""What every open model or engine answers to, whichever runtime it is open in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..contract import Contract
from ..inputs.batch import Array
from .decoder import Decoder
from .slots import Slots


class Runner(Protocol):
    """See OrtRunner, whose interface this is."""

    @property
    def model(self) -> Path:
        """The file that is open: a model, or an engine."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Name and element type of each input."""

    @property
    def outputs(self) -> list[str]:
        """Names, in the graph's order."""

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run once. Raises InputError naming the input that is missing, extra, or mis-shaped."""

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        """A new batch of sequences to continue; see decoder.DecoderRunner."""

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:
        """Places for `rows` texts of up to `capacity` tokens that come and go; see slots.Slots."""

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        """What the cache of one text of so many tokens takes in memory."""

    def close(self) -> None: ...
