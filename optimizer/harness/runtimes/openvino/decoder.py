"""Continue sequences with OpenVINO, which keeps their keys and values in an infer request: as its
states, where padded columns have keys and values too, or in blocks, where they have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...contract import Contract
from ...errors import InputError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import check_step
from ..ort.decoder import LOGITS, Named, check_graph
from .paged import Pages
from .stateful import ROWS, variable

Pairs = Sequence[tuple[str, str]]


class Opened(Named, Protocol):
    """What is needed of an open model: see OpenVinoRunner."""

    def request(self) -> Any: ...
    def run(self, request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]: ...


class Paged(Named, Protocol):
    """An open model whose cache can be paged."""

    def pages(self, texts: int, tokens: int) -> Pages: ...


class OpenVinoDecoder:
    """A batch of sequences; see decoder.Decoder. Raises BundleError when the model has not the
    inputs and outputs of the contract."""

    def __init__(self, runner: Opened, contract: Contract) -> None:
        self._runner, self._names = runner, kv_cache.names(contract.decoder.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._request = runner.request()
        self._rows = self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """logits (batch, sequence, vocabulary), float32. Raises InputError for arrays that are
        not the contract's, or whose shapes do not continue what is remembered."""
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        logits = self._runner.run(self._request, {**arrays, ROWS: every(rows)})[LOGITS]
        self._rows, self.past = rows, self.past + sequence
        return logits

    def cache(self) -> dict[str, Array]:
        """Copies of what is remembered: present.{i}.key and .value, (batch, kv_heads, past,
        head_dim) each; nothing before the first step."""
        return read_states(self._request, self._names) if self.past else {}


class PagedDecoder:
    """A batch of sequences; see decoder.Decoder. A row is a text of its pages, without its padding.

    capacity: tokens of each row that room is made for at first. Raises BundleError when the model
    has not the inputs and outputs of the contract.
    """

    def __init__(self, runner: Paged, contract: Contract, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._names = kv_cache.names(contract.decoder.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._pages: Pages | None = None
        self._seen = np.zeros((0, 0), bool)  # (batch, past): no padding

    @property
    def past(self) -> int:
        """See decoder.Decoder."""
        return self._seen.shape[1]

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """logits (batch, sequence, vocabulary), float32, 0 where padded. Raises InputError for
        arrays that are not the contract's, whose shapes do not continue what is remembered, whose
        mask hides what was seen, or whose positions do not count a row's tokens."""
        rows, sequence = check_step(arrays, self._inputs, self.past, len(self._seen))
        mask = np.asarray(arrays["attention_mask"], bool)
        self._check(arrays, mask, rows, sequence)
        new, ids = mask[:, self.past :], arrays["input_ids"]
        if self._pages is None:
            self._pages = self._runner.pages(rows, max(self._capacity, sequence))
            for row in range(rows):
                self._pages.open(row)
        tokens = {row: ids[row][new[row]] for row in range(rows) if new[row].any()}
        scores = self._pages.run(tokens)
        self._seen = mask
        if rows == 1 and len(scores[0]) == sequence:
            return scores[0][None]
        logits = np.zeros((rows, sequence, scores[0].shape[1]), np.float32)
        for row, values in zip(tokens, scores, strict=True):
            logits[row][new[row]] = values
        return logits

    def _check(self, arrays: Mapping[str, Array], mask: Array, rows: int, sequence: int) -> None:
        if self.past and not np.array_equal(mask[:, : self.past], self._seen):
            raise InputError(
                "it hides a token that was seen, or shows one that was padding",
                where="input attention_mask",
                accepted="the last step's, continued",
            )
        new, positions = mask[:, self.past :], arrays["position_ids"]
        if not np.array_equal(positions[new], kv_cache.position_ids(mask, sequence)[new]):
            raise InputError(
                "they do not count each row's tokens from 0", where="input position_ids"
            )
        if not new.any():
            raise InputError(f"{rows} rows of padding alone", where="input attention_mask")

    def cache(self) -> dict[str, Array]:
        """Copies of what is remembered: present.{i}.key and .value, (batch, kv_heads, past,
        head_dim) each, 0 where padded; nothing before the first step."""
        if self._pages is None:
            return {}
        kept: dict[str, Array] = {}
        for row, seen in enumerate(self._seen):
            copied = self._pages.copied(row, 0, int(seen.sum()))
            for (_, present), array in zip(self._names, copied, strict=True):
                heads, _, size = array.shape
                shape = (len(self._seen), heads, self.past, size)
                whole = kept.setdefault(present, np.zeros(shape, array.dtype))
                whole[row][:, seen] = array
        return kept


def every(rows: int) -> Array:
    """beam_idx where each row continues itself."""
    return np.arange(rows, dtype=np.int32)


def read_states(request: Any, names: Pairs) -> dict[str, Array]:
    """{present: a copy} of a request's cache, float32."""
    states = {state.name: state for state in request.query_state()}
    return {
        present: np.array(states[variable(past, present)].state.data, np.float32)
        for past, present in names
    }


def write_states(ov: Any, request: Any, names: Pairs, arrays: Mapping[str, Array]) -> None:
    """Make `arrays`, by the names of pasts, a request's cache; all empty: as at the start."""
    request.reset_state()
    states = {state.name: state for state in request.query_state()}
    for past, present in names:
        if arrays[past].shape[2]:
            states[variable(past, present)].state = ov.Tensor(np.ascontiguousarray(arrays[past]))
