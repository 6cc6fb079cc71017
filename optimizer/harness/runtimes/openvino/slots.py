"""Continuous batching in OpenVINO's paged KV cache.

A step of several texts is one run, without padding rows. Law (measured by
server/warm_up/generation.py before it is relied on): the scores of a text do not depend on the
other texts. It holds in every bit where products are integer sums, as in kernels with
`dynamic_quantization`; float sums round in another order for another number of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...contract import Contract
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..ort.decoder import check_graph
from .decoder import PagedModel


class PagedSlots:
    """Slots for texts over OpenVINO's paged KV cache; see slots.Slots.

    rows: maximum number of texts.
    capacity: tokens per text, prompt and answer; memory is used on demand.
    """

    together = True
    multiple = 1  # rows of a step are padded to a multiple of it by idle texts

    def __init__(self, runner: PagedModel, contract: Contract, rows: int, capacity: int) -> None:
        names = kv_cache.list_names(contract.decoder.layers)
        check_graph(runner, [i.name for i in contract.inputs], names)
        self._pages = runner.pages(rows, capacity)
        self._idle = [*range(-1, -1 - rows, -1)]  # texts that pad a step
        for text in self._idle:
            self._pages.open(text)

    def open(self, text: int, adapter: str = "") -> None:  # noqa: ARG002
        self._pages.open(text)

    def close(self, text: int) -> None:
        self._pages.close(text)

    def read(self, text: int, ids: Sequence[int]) -> Array:
        last: Array = self.scores(text, ids)[-1]
        return last

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        (scores,) = self._pages.run({text: ids})
        return scores

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        idle = self._idle[: -len(tokens) % self.multiple]
        scores = self._pages.run({text: [tokens.get(text, 0)] for text in (*tokens, *idle)})
        for text in idle:
            self._pages.forget(text)
        return {text: row[-1] for text, row in zip(tokens, scores, strict=False)}

    def undo(self, text: int, tokens: int = 1) -> None:
        self._pages.forget(text, tokens)

    def copy_tokens(self, text: int, start: int, stop: int) -> list[Array]:
        return self._pages.copy_tokens(text, start, stop)

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        self._pages.append(text, arrays)
