"""Several texts in one cache of OpenVINO, each of its own length, begun and ended at any time.

A step of several texts is one run, and what is multiplied by a weight has a row for each text and
none for padding. Law (measured at warm-up: server/warm_up/generation.py): a text's scores
do not depend on the others. It holds in every bit where products are sums of integers, as kernels
with `dynamic_quantization` make them; sums of floats round in another order for another number of
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...contract import Contract
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..ort.decoder import check_graph
from .decoder import Paged


class PagedSlots:
    """See the module, and slots.Slots. rows: texts at once. capacity: tokens of each, prompt and
    answer; their memory is taken as it is used."""

    together = True
    multiple = 1  # a step runs a multiple of so many texts, some of one token and for nothing

    def __init__(self, runner: Paged, contract: Contract, rows: int, capacity: int) -> None:
        names = kv_cache.names(contract.decoder.layers)
        check_graph(runner, [i.name for i in contract.inputs], names)
        self._pages = runner.pages(rows, capacity)
        self._idle = [*range(-1, -1 - rows, -1)]  # what runs for nothing
        for text in self._idle:
            self._pages.open(text)

    def open(self, text: int) -> None:
        """See Slots."""
        self._pages.open(text)

    def close(self, text: int) -> None:
        """See Slots."""
        self._pages.close(text)

    def read(self, text: int, ids: Sequence[int]) -> Array:
        """See Slots."""
        last: Array = self.scores(text, ids)[-1]
        return last

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        """See Slots."""
        (scores,) = self._pages.run({text: ids})
        return scores

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """See Slots."""
        idle = self._idle[: -len(tokens) % self.multiple]
        scores = self._pages.run({text: [tokens.get(text, 0)] for text in (*tokens, *idle)})
        for text in idle:
            self._pages.forget(text)
        return {text: row[-1] for text, row in zip(tokens, scores, strict=False)}

    def undo(self, text: int, tokens: int = 1) -> None:
        """See Slots."""
        self._pages.forget(text, tokens)

    def copied(self, text: int, start: int, stop: int) -> list[Array]:
        """See Slots."""
        return self._pages.copied(text, start, stop)

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        """See Slots."""
        self._pages.append(text, arrays)
