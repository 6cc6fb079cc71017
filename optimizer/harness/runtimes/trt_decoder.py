"""Continue sequences with a TensorRT engine, the key/value cache staying on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract import Contract
from ..errors import MachineError
from ..tasks.batch import Array


class TrtDecoder:
    """A batch of sequences; see decoder.Decoder, whose interface this is.

    What a step writes as present.{i} is read as past_key_values.{i} by the next, without leaving
    the device. capacity: tokens its buffers are made for; they grow when it is passed.
    """

    past: int = 0

    def __init__(self, runner: Any, contract: Contract, capacity: int = 0) -> None:
        self._runner, self._contract, self._capacity = runner, contract, capacity
        raise MachineError("engines are not run yet")

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """logits (batch, sequence, vocabulary), float32. Raises InputError for arrays that are
        not the contract's, or that leave the engine's profiles."""
        raise NotImplementedError

    def cache(self) -> dict[str, Array]:
        """Copies of what is remembered: present.{i}.key and .value."""
        raise NotImplementedError
