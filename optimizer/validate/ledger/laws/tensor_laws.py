"""Check that rows of arrays reach the model as they are.

compared   the harness's arrays with the rows, stacked here; answers with the model's outputs
limit      none: equal
caught     an input of another type, an output of another row:
           test_an_input_of_another_type_is_caught_at_the_harness
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.tensors import ONLY, TENSORS
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks import tensors
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.validate.materials import Materials

ANSWERED = 8  # rows
UNJUDGED = (
    "the fields of answers, and arrays of rows: task {} makes them by code of another package; "
    "that a row's arrays and answer do not depend on its batch was tested"
)


def compare_arrays(
    checkpoint: Path, source: Contract, served: Contract, encoder: Any, rows: Sequence[Any]
) -> list[str]:
    """Return a problem for each input that the harness gives the model with other values than the
    row, or, of a task that prepares rows, than the row alone has. The arguments are those of
    contract_laws.compare_tokens."""
    del checkpoint
    batch, broken = tasks.encode(served, encoder, rows), []
    kind = tasks.look_up(served).inputs
    prepared = rows
    if kind is not TENSORS:
        prepared = [kind.encode(source, encoder, [row])[0].encoding for row in rows]
    for spec in source.inputs:
        key = spec.name if spec.name in prepared[0] else ONLY
        expected = np.stack([np.asarray(row[key]) for row in prepared]).astype(spec.dtype)
        encoded = batch.get(spec.name)
        if (
            encoded is None
            or encoded.dtype != expected.dtype
            or not np.array_equal(encoded, expected)
        ):
            broken.append(f"{spec.name} of {len(rows)} rows differs from the rows")
    return broken


def explain_unjudged(task: str) -> str:
    """Explain that the answers of another package's task are not judged; "" for task tensors."""
    return "" if task == tensors.TASK.name else UNJUDGED.format(task)


def compare_answers(m: Materials, served: Contract, encoder: Any, runner: Runner) -> list[str]:
    """Return sentences on answers that differ from the model's own numbers, or, by a task of
    another package, from its answer to the same numbers alone. The arguments are those of
    answer_laws.compare_answers."""
    rows = list(dict.fromkeys(m.texts))[:ANSWERED]
    if explain_unjudged(served.task):
        return compare_with_alone(served, encoder, runner, rows)
    queries = [Query(f"row {i + 1}", row) for i, row in enumerate(rows)]
    answered = list(answer(Predictor(served, encoder, runner.infer), queries, ANSWERED))
    outputs = runner.infer(tasks.encode(m.contract, m.encoder, rows))
    problems = []
    for i, one in enumerate(answered):
        fields = one.answer or {}
        for spec in m.contract.outputs:
            expected = outputs[spec.name][i].astype(np.float64)
            if spec.name not in fields or not np.array_equal(fields[spec.name], expected):
                problems.append(f"{one.where}: {spec.name} is not the model's")
    return problems


def compare_with_alone(
    served: Contract, encoder: Any, runner: Runner, rows: Sequence[Any]
) -> list[str]:
    """Return a sentence for each row whose answer, of the same outputs, is another in a batch than
    alone.

    Raises BundleError where the task raises an error.
    """
    batch = tasks.encode(served, encoder, rows)
    values = tasks.decode(served, runner.infer(batch), batch)
    together = tasks.build_answers(served, values, batch)
    problems = []
    for i, row in enumerate(rows):
        one = tasks.encode(served, encoder, [row])
        (alone,) = tasks.build_answers(served, values[i : i + 1], one)
        try:
            same = json.dumps(alone) == json.dumps(together[i])
        except TypeError as e:
            return [f"row {i + 1}: the answer of task {served.task} is not JSON: {e}"]
        if not same:
            problems.append(f"row {i + 1}: task {served.task} gives another answer in a batch")
    return problems


def compare_contract(served: Contract, config: dict[str, Any]) -> list[str]:
    """Return []: config.json of an ONNX file has no sizes of inputs to compare."""
    del served, config
    return []
