"""Continue sequences with OpenVINO, which keeps their keys and values in an infer request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ... import kv_cache
from ...contract import Contract
from ...inputs.batch import Array
from ..decoder import check_step
from ..ort.decoder import LOGITS, Named, check_graph
from .stateful import ROWS, variable

Pairs = Sequence[tuple[str, str]]


class Opened(Named, Protocol):
    """What is needed of an open model: see OpenVinoRunner."""

    def request(self) -> Any: ...
    def run(self, request: Any, arrays: Mapping[str, Array]) -> dict[str, Array]: ...


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
