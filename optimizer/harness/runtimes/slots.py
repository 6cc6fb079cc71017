"""Continuous batching: texts generated together, each started and ended at any time.

    slots = runner.slots(contract, rows=8, capacity=1024)
    slots.open(7)                             reserve a slot for text 7
    scores = slots.read(7, ids)               prefill, at once or in pieces
    scores = slots.step({7: a, 9: b})         decode one token of each of these texts
    scores = slots.scores(7, ids)             add several tokens, with scores after each
    slots.undo(7, 2)                          remove the two newest tokens from the KV cache
    slots.close(7)                            free the slot
    slots.append(9, slots.copy_tokens(7, 0, 64))   copy a prefix of the KV cache to another text

Law (measured by server/warm_up/generation.py before it is relied on): the scores of a text do not
depend on the other texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from ..contract import Contract
from ..inputs import kv_cache
from ..inputs.batch import Array
from .decoder import Decoder, DecoderRunner


class Slots(Protocol):
    """Slots of one model. Scores are (vocabulary,) float32, after the newest token."""

    @property
    def together(self) -> bool:
        """True if a step of several texts is one run of the model."""

    multiple: int
    """The rows of a step are padded to a multiple of this number; 1 if not `together`."""

    def open(self, text: int, adapter: str = "") -> None:
        """Reserve a slot. adapter: name of the adapter of the text, of OrtRunner.adapters; "" for
        the model itself, which is all that other runtimes accept"""

    def read(self, text: int, ids: Sequence[int]) -> Array: ...
    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]: ...
    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """Add tokens to a text; return the scores (tokens, vocabulary) after each. Only if
        `together`."""

    def undo(self, text: int, tokens: int = 1) -> None:
        """Remove the newest tokens of a text from the KV cache. Only if `together`."""

    def close(self, text: int) -> None: ...
    def copy_tokens(self, text: int, start: int, stop: int) -> Sequence[Array]:
        """Return copies of the keys and values of tokens [start, stop). Only if `together`."""

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Add tokens to a text by keys and values `copied` from a text with the same prefix.
        Only if `together`."""


class SeparateDecoders:
    """Slots for any runtime: a Decoder (one generation) per text, run one after another."""

    together = False
    multiple = 1

    def __init__(
        self,
        runner: DecoderRunner,
        contract: Contract,
        capacity: int,
        adapters: Mapping[str, DecoderRunner] | None = None,
    ) -> None:
        self._contract, self._capacity = contract, capacity
        self._runners = {"": runner, **(adapters or {})}
        self._decoders: dict[int, Decoder] = {}

    def open(self, text: int, adapter: str = "") -> None:
        self._decoders[text] = self._runners[adapter].decoder(self._contract, self._capacity)

    def read(self, text: int, ids: Sequence[int]) -> Array:
        decoder = self._decoders[text]
        mask = np.ones((1, decoder.past + len(ids)), np.int64)
        arrays = {"input_ids": np.array([ids], np.int64), "attention_mask": mask}
        arrays["position_ids"] = kv_cache.position_ids(mask, len(ids))
        expected = {i.name: arrays[i.name].astype(i.dtype) for i in self._contract.inputs}
        return np.asarray(decoder.last(expected)[0])

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        return {text: self.read(text, [token]) for text, token in tokens.items()}

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """Not supported, because `together` is False."""
        raise NotImplementedError

    def undo(self, text: int, tokens: int = 1) -> None:
        """Not supported, because `together` is False."""
        raise NotImplementedError

    def close(self, text: int) -> None:
        del self._decoders[text]

    def copy_tokens(self, text: int, start: int, stop: int) -> Sequence[Array]:
        """Not supported, because `together` is False."""
        raise NotImplementedError

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Not supported, because `together` is False."""
        raise NotImplementedError
