"""Compare answers to inputs that are several rows of the model each with the reference's.

compared   answers of the harness, and the reference's from the model's outputs for the same rows,
           which are found by their token ids
limit      that of the reference's numbers; see answer_laws.py
callers    span_laws.py, claim_laws.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.validate.ledger.laws.answer_fields import differ
from optimizer.validate.ledger.laws.answer_laws import ANSWERED

Ids = Sequence[Sequence[int]]


def compare(
    served: Contract,
    encoder: Any,
    runner: Runner,
    queries: Sequence[Query],
    encode: Callable[[Query], Ids],
    expected: Callable[[Query, Sequence[Array]], Any],
) -> list[str]:
    """Return sentences on answers of the harness that differ from the reference's.

    served: the harness's contract
    encoder: the harness's tokenizer
    runner: the model that the harness runs
    queries: inputs, each of several rows of the model
    encode: function query -> token ids of its rows, by transformers' tokenizer
    expected: function (query, output of each of its rows without padding) -> reference's answer
    """
    rows: dict[bytes, Array] = {}
    output = tasks.look_up(served).output
    by_token = tasks.look_up(served).per_position

    def infer(arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        outputs = runner.infer(arrays)
        values = np.asarray(outputs[output], np.float32)
        sizes = arrays["attention_mask"].sum(1)
        for ids, size, row in zip(arrays["input_ids"], sizes, values, strict=True):
            rows[_key(ids[:size])] = row[:size] if by_token else row
        return outputs

    problems: list[str] = []
    answered = answer(Predictor(served, encoder, infer), queries, ANSWERED)
    for query, one in zip(queries, list(answered), strict=True):
        outputs = [rows.get(_key(ids)) for ids in encode(query)]
        if one.answer is None or any(row is None for row in outputs):
            problems.append(
                f"{query.where}: it has no answer, or the model did not read one of its rows"
            )
            continue
        target = expected(query, [row for row in outputs if row is not None])
        problems += [f"{query.where}: {d}" for d in differ(one.answer, target)]
    return problems


def _key(ids: Sequence[int] | Array) -> bytes:
    return np.asarray(ids, np.int64).tobytes()
