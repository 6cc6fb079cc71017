"""Several texts that are continued at once, each begun and ended at any time.

    slots = runner.slots(contract, rows=8, capacity=1024)
    slots.open(7)                          a place for a text, which is number 7 from now on
    scores = slots.read(7, ids)            its prompt, whole or in pieces
    scores = slots.step({7: a, 9: b})      one token more of each of these, in any order
    scores = slots.scores(7, ids)          several tokens more, and what follows each of them
    slots.undo(7, 2)                       the two newest were wrong
    slots.close(7)                         its place may be another's
    slots.append(9, slots.copied(7, 0, 64))   the first tokens of 7 as those of 9, not computed

Law (measured at warm-up: server/warm_up/generation.py): a text's scores do not depend on the
others.
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
    """See the module. Scores are (vocabulary,) float32, of the token after the newest."""

    @property
    def together(self) -> bool:
        """Whether a step of several texts is one run of the model."""

    multiple: int
    """Rows of a step are a multiple of it; of those that are not `together`, 1."""

    def open(self, text: int) -> None: ...
    def read(self, text: int, ids: Sequence[int]) -> Array: ...
    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]: ...
    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """Continue a text by these tokens. Scores (tokens, vocabulary) of what follows each.
        Where `together`."""

    def undo(self, text: int, tokens: int = 1) -> None:
        """Forget the newest tokens of a text: the next ones take their places. Where
        `together`."""

    def close(self, text: int) -> None: ...
    def copied(self, text: int, start: int, stop: int) -> Sequence[Array]:
        """Keys and values of tokens start..stop of a text, for `append`. Where `together`."""

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Continue a text by tokens that were `copied` of one that begins alike. Where
        `together`."""


class SeparateDecoders:
    """A decoder for each text, one run after the other: for any runtime."""

    together = False
    multiple = 1

    def __init__(self, runner: DecoderRunner, contract: Contract, capacity: int) -> None:
        self._runner, self._contract, self._capacity = runner, contract, capacity
        self._decoders: dict[int, Decoder] = {}

    def open(self, text: int) -> None:
        """See Slots."""
        self._decoders[text] = self._runner.decoder(self._contract, self._capacity)

    def read(self, text: int, ids: Sequence[int]) -> Array:
        """See Slots."""
        decoder = self._decoders[text]
        mask = np.ones((1, decoder.past + len(ids)), np.int64)
        arrays = {"input_ids": np.array([ids], np.int64), "attention_mask": mask}
        arrays["position_ids"] = kv_cache.position_ids(mask, len(ids))
        expected = {i.name: arrays[i.name].astype(i.dtype) for i in self._contract.inputs}
        return np.asarray(decoder.step(expected)[0, -1])

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """See Slots."""
        return {text: self.read(text, [token]) for text, token in tokens.items()}

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """Not of these."""
        raise NotImplementedError

    def undo(self, text: int, tokens: int = 1) -> None:
        """Not of these."""
        raise NotImplementedError

    def close(self, text: int) -> None:
        """See Slots."""
        del self._decoders[text]

    def copied(self, text: int, start: int, stop: int) -> Sequence[Array]:
        """Not of these."""
        raise NotImplementedError

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Not of these."""
        raise NotImplementedError
