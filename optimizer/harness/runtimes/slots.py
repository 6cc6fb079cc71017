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
    """Slots of a model opened by a runtime, each for a text that is being generated.

    A text is numbered by the caller. Scores are the logits (vocabulary,) float32 of the next token.
    """

    @property
    def together(self) -> bool:
        """Return True if one run of the runtime decodes several texts."""

    multiple: int
    """The rows of a step are padded to a multiple of this number; 1 if not `together`."""

    def open(self, text: int, adapter: str = "") -> None:
        """Reserve a slot of the runtime's KV cache for a text.

        adapter: name in OrtRunner.adapters of the LoRA adapter that the text uses; "" for the model
            itself, the only value that other runtimes accept
        """

    def read(self, text: int, ids: Sequence[int]) -> Array:
        """Run the engine on prompt tokens `ids` of a text (prefill); return the scores after the
        last one."""

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """Run the engine on one token of each text: {text: its newest token} -> {text: scores of
        the next}."""

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """Run the engine on several tokens of a text, such as guesses, in one step; return the
        scores (tokens, vocabulary) after each.

        Available only if `together` is True.
        """

    def undo(self, text: int, tokens: int = 1) -> None:
        """Remove the newest `tokens` tokens of a text, such as wrong guesses, from the KV cache.

        Available only if `together` is True.
        """

    def close(self, text: int) -> None:
        """Remove a text that has ended from its slot of the KV cache, which is then free."""

    def copy_tokens(self, text: int, start: int, stop: int) -> Sequence[Array]:
        """Return copies of the keys and values in the KV cache of tokens [start, stop), layer by
        layer.

        Available only if `together` is True.
        """

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """Add tokens to a text's KV cache by their keys and values.

        arrays: result of `copy_tokens` of a text with the same tokens up to the last copied one

        Available only if `together` is True.
        """


class SeparateDecoders:
    """Slots for a runtime that cannot decode several texts in one run: each text has a Decoder, and
    they run one after another."""

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
