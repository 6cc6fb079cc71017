"""Generation with OpenVINO.

The KV cache is in an infer request, as states with padding (`OpenVinoDecoder`) or as blocks without
padding (`PagedDecoder`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ...contract import Contract
from ...errors import InputError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import LastOfStep, check_step
from ..ort.decoder import LOGITS, ModelPorts, check_graph
from .paged import Pages
from .stateful import ROWS, variable

Pairs = Sequence[tuple[str, str]]


class StatefulModel(ModelPorts, Protocol):
    """Interface of a model open in OpenVINO that keeps its KV cache as states; see
    OpenVinoRunner."""

    def request(self) -> Any: ...
    def run(self, request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]: ...


class PagedModel(ModelPorts, Protocol):
    """Interface of a model open in OpenVINO with a paged KV cache."""

    def pages(self, texts: int, tokens: int) -> Pages: ...


class OpenVinoDecoder(LastOfStep):
    """Decoder whose KV cache is a set of OpenVINO states; see decoder.Decoder.

    Raises BundleError if inputs or outputs of the model and the contract differ.
    """

    def __init__(self, runner: StatefulModel, contract: Contract) -> None:
        self._runner, self._names = runner, kv_cache.list_names(contract.decoder.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._request = runner.request()
        self._rows = self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        logits = self._runner.run(self._request, {**arrays, ROWS: identity_rows(rows)})[LOGITS]
        self._rows, self.past = rows, self.past + sequence
        return logits

    def cache(self) -> dict[str, Array]:
        """Return copies of OpenVINO's KV cache {present: array}, float32."""
        return read_states(self._request, self._names) if self.past else {}


class PagedDecoder(LastOfStep):
    """Decoder with OpenVINO's paged KV cache; see decoder.Decoder. Padding is not in the cache.

    capacity: initial capacity of each row in tokens.
    Raises BundleError if inputs or outputs of the model and the contract differ.
    """

    def __init__(self, runner: PagedModel, contract: Contract, capacity: int) -> None:
        self._runner, self._capacity = runner, capacity
        self._names = kv_cache.list_names(contract.decoder.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._pages: Pages | None = None
        self._seen = np.zeros((0, 0), bool)  # (batch, past): True where not padding

    @property
    def past(self) -> int:
        return self._seen.shape[1]

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """Run the paged OpenVINO model on new tokens; return logits (batch, sequence, vocabulary),
        float32, 0 where padded.

        Raises InputError for arrays that contradict the contract or the KV cache, for a mask that
        changes earlier columns, and for position ids that do not count each row's tokens.
        """
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
        """Check a step of OpenVINO's decoder: raise InputError for a mask or position ids that
        contradict earlier steps, or for rows of padding only."""
        if self.past and not np.array_equal(mask[:, : self.past], self._seen):
            raise InputError(
                "it changes columns of an earlier step",
                where="input attention_mask",
                accepted="the mask of the last step, extended",
            )
        new, positions = mask[:, self.past :], arrays["position_ids"]
        if not np.array_equal(positions[new], kv_cache.position_ids(mask, sequence)[new]):
            raise InputError(
                "position ids do not count each row's tokens from 0", where="input position_ids"
            )
        if not new.any():
            raise InputError(f"all {rows} rows are only padding", where="input attention_mask")

    def cache(self) -> dict[str, Array]:
        """Return copies of OpenVINO's KV cache: present.{i}.key and .value, (batch, kv_heads, past,
        head_dim) each, 0 where padded; {} before the first step."""
        if self._pages is None:
            return {}
        arrays: dict[str, Array] = {}
        for row, seen in enumerate(self._seen):
            copied = self._pages.copy_tokens(row, 0, int(seen.sum()))
            for (_, present), array in zip(self._names, copied, strict=True):
                heads, _, size = array.shape
                shape = (len(self._seen), heads, self.past, size)
                padded = arrays.setdefault(present, np.zeros(shape, array.dtype))
                padded[row][:, seen] = array
        return arrays


def identity_rows(rows: int) -> Array:
    """Return OpenVINO's input `beam_idx` (rows,) with which each row continues its own KV cache."""
    return np.arange(rows, dtype=np.int32)


def read_states(request: Any, names: Pairs) -> dict[str, Array]:
    """Copy the KV cache of an infer request of OpenVINO to arrays {present: array}, float32.

    names: (past, present) of each state
    """
    states = {state.name: state for state in request.query_state()}
    return {
        present: np.array(states[variable(past, present)].state.data, np.float32)
        for past, present in names
    }


def write_states(ov: Any, request: Any, names: Pairs, arrays: Mapping[str, Array]) -> None:
    """Set the KV cache of an infer request of OpenVINO from arrays {past: array}; empty arrays
    reset it.

    names: (past, present) of each state
    """
    request.reset_state()
    states = {state.name: state for state in request.query_state()}
    for past, present in names:
        if arrays[past].shape[2]:
            states[variable(past, present)].state = ov.Tensor(np.ascontiguousarray(arrays[past]))
