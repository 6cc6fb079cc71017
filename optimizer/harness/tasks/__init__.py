"""Encode inputs into arrays and decode outputs into answers, with one file and record per task.

    task    = of(contract)                                the task's record
    batch   = encode(contract, encoder, inputs)           arrays of the model
    outputs = runner.infer(batch)
    values  = decode(contract, outputs, batch)            array of the task, see below
    results = answers(contract, values, batch)            one JSON object per input

Arrays returned by decode:

    sentence-embedding          (batch, width)
    sparse-embedding            (batch, vocabulary) weights
    text-classification         (batch, labels) logits
    text-ranking                (batch, 1) logits
    zero-shot-classification    (batch, labels) logits of natural language inference
    token-classification        (batch, sequence, labels) logits, zero where padded
    fill-mask                   (batch, sequence, vocabulary) logits, zero where padded
    question-answering          (batch, sequence, 2) logits of start and end, zero where padded
    feature-extraction          (batch, sequence, width), zero where padded
    text-generation             (batch, sequence, vocabulary) logits, zero where padded
    image-classification        (batch, labels) logits
    image-feature-extraction    (batch, width)
    zero-shot-image-classification  (batch, labels) logits
    object-detection            (batch, queries, classes + 4): logits, then boxes of 0 to 1
    image-segmentation          (batch, classes, rows, columns) logits, smaller than the image
    universal-segmentation      (batch, queries, classes + pixels): logits, then logits of the mask
    depth-estimation            (batch, rows, columns), of the model's size
    keypoint-detection          (boxes, keypoints, rows, columns) heatmaps
    tensors, detector           (batch, numbers) all outputs, flattened and joined

Text generation runs the model many times: text_generation.arrays encodes the prompt, generate/ does
the rest.

Law (tested): the other inputs of a batch change an answer by float rounding only, because nothing
here mixes rows and padded positions never enter a sum.

A task of another package is an entry point of the group "optimizer.tasks": its name is the task's,
its object the task's record. The module may import the standard library, numpy and
optimizer.harness only, because it is copied into this folder of a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from ..contract import ACTIVATIONS, OPTIONAL, SECTIONS, Contract
from ..errors import AnswerError, BundleError, InputError, require
from ..inputs.batch import Array, Batch
from ..inputs.kind import Encoded
from . import (
    fill_mask,
    question_answering,
    tensors,
    text_classification,
    text_generation,
    text_ranking,
    token_classification,
    zero_shot_classification,
)
from .embeddings import (
    feature_extraction,
    image_text_embedding,
    sentence_embedding,
    sparse_embedding,
)
from .images import (
    depth_estimation,
    detector,
    image_classification,
    image_feature_extraction,
    image_segmentation,
    keypoint_detection,
    object_detection,
    universal_segmentation,
    zero_shot_image_classification,
)
from .task import Task

__all__ = [
    "Array",
    "Batch",
    "Task",
    "build_answers",
    "check",
    "decode",
    "encode",
    "encode_each",
    "find_task",
    "list_generating",
    "list_names",
    "longest",
    "look_up",
]

AGAIN = "The model does not match its contract: package it again."
GROUP = "optimizer.tasks"
TASKS: dict[str, Task] = {
    t.name: t
    for t in (
        sentence_embedding.TASK,
        sparse_embedding.TASK,
        text_classification.TASK,
        text_ranking.TASK,
        token_classification.TASK,
        fill_mask.TASK,
        question_answering.TASK,
        zero_shot_classification.TASK,
        feature_extraction.TASK,
        text_generation.TASK,
        image_classification.TASK,
        image_feature_extraction.TASK,
        image_text_embedding.TASK,
        zero_shot_image_classification.TASK,
        tensors.TASK,
        detector.TASK,
        object_detection.TASK,
        image_segmentation.TASK,
        universal_segmentation.TASK,
        depth_estimation.TASK,
        keypoint_detection.TASK,
    )
}


def find_task(name: str) -> Task:
    """Return the Task `name`, from TASKS, a module of this folder (in a bundle) or an entry point.

    Raises KeyError for an unknown task.
    """
    if name in TASKS:
        return TASKS[name]
    module = name.replace("-", "_")
    if module.isidentifier() and (Path(__file__).parent / f"{module}.py").is_file():
        for record in vars(import_module(f".{module}", __package__)).values():
            if isinstance(record, Task) and record.name == name:
                return record
    for point in entry_points(group=GROUP, name=name):
        record = point.load()
        if not isinstance(record, Task) or record.name != name:
            raise TypeError(f"entry point {point.value} is not a Task named {name!r}")
        return record
    raise KeyError(name)


_outside_task = cache(find_task)  # searches the entry points once, not at every batch


def look_up(contract: Contract) -> Task:
    """Return the Task that a contract names. Raises KeyError for an unknown name."""
    return TASKS.get(contract.task) or _outside_task(contract.task)


def check(contract: Contract, where: str = "contract.json") -> Task:
    """Check the parts of a contract that its task determines, and return its Task.

    where: file of the contract, for messages. Raises BundleError for an unknown task, and for
    inputs, outputs or sections that the task does not have.
    """
    try:
        record = look_up(contract)
    except KeyError:
        require(False, f"{where}: task", contract.task, ", ".join(list_names()))
        raise
    kind = record.inputs
    require(
        contract.input_kind == kind.name, f"{where}: input_kind", contract.input_kind, kind.name
    )
    inputs = [i.name for i in contract.inputs]
    accepted = None if record.arrays is None else {*kind.arrays, *record.arrays}
    require(
        set(kind.arrays) <= set(inputs) and (accepted is None or set(inputs) <= accepted),
        f"{where}: inputs",
        inputs,
        " and ".join(kind.arrays) + f", and perhaps {', '.join(record.arrays or ['any'])}",
    )
    outputs = [o.name for o in contract.outputs]
    complete = record.output in outputs if record.output else bool(outputs)
    require(complete, f"{where}: outputs", outputs, f"one called {record.output or 'anything'}")
    for name in record.beside:
        require(name in outputs, f"{where}: outputs", outputs, f"one called {name}")
    for section in SECTIONS:
        value = getattr(contract, section)
        belongs = section in (*kind.sections, *record.sections)
        needed = f"a value, for {contract.task}" if belongs else f"null, for {contract.task}"
        require((value is not None) == belongs, f"{where}: {section}", value, needed)
    for section in set(OPTIONAL) - set(record.optional):
        value = getattr(contract, section)
        require(value is None, f"{where}: {section}", value, f"null, for {contract.task}")
    if record.ranks:
        labels, activation = contract.labels or (), contract.activation
        require(len(labels) == 1, f"{where}: labels", list(labels), f"one, for {contract.task}")
        accepted_activations = f"{' or '.join(ACTIVATIONS)}, for {contract.task}"
        require(activation is not None, f"{where}: activation", activation, accepted_activations)
    needs = {"answers": record.extracts, "zero_shot": record.chooses, "sparse": record.weighs}
    needs["detections"] = "detections" in record.optional
    for section, has_it in needs.items():
        present = getattr(contract, section) is not None or not has_it
        require(present, f"{where}: {section}", None, f"a value, for {contract.task}")
    if contract.zero_shot is not None:
        last, number = len(contract.labels or ()) - 1, contract.zero_shot.entailment
        require(0 < last >= number, f"{where}: zero_shot.entailment", number, f"0 to {last}")
    if contract.detections is not None:
        detector.find_fields(contract)
    if contract.label_texts is not None:
        name = zero_shot_image_classification.VECTOR
        require(
            name in outputs, f"{where}: outputs", outputs, f"one called {name}, for label_texts"
        )
    masked = contract.tokenizer is not None and contract.tokenizer.mask_id is not None
    require(masked or not record.fills, f"{where}: tokenizer.mask_id", None, "the id of a mask")
    return record


def longest(contract: Contract) -> int:
    """Return the maximum size of a task's input, e.g. the tokens of a text."""
    return look_up(contract).inputs.longest(contract)


def list_names() -> list[str]:
    """Return the names of all tasks, the table's first."""
    return [*TASKS, *sorted({p.name for p in entry_points(group=GROUP)} - {*TASKS})]


def list_generating() -> list[str]:
    """Return the names of the text-generation tasks, the table's first.

    Entry points that cannot be loaded are skipped; `find_task` raises their error.
    """
    generate = []
    for name in list_names():
        with suppress(ImportError, AttributeError, TypeError):
            generate += [name] if find_task(name).generates else []
    return generate


def encode_each(
    contract: Contract, encoder: Any, inputs: Sequence[Any], pairs: Sequence[Any] | None = None
) -> list[Encoded]:
    """Encode a task's inputs that are to be answered. One that the model cannot read, or that the
    task cannot answer, gets a `problem`. Raises the kind's InputError."""
    record = look_up(contract)
    each = []
    for one in record.inputs.encode(contract, encoder, inputs, pairs):
        problem, fix = ("", "") if one.problem else record.check(contract, one)
        each.append(replace(one, problem=problem, fix=fix) if problem else one)
    return each


def encode(
    contract: Contract,
    encoder: Any,
    inputs: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    size: int | None = None,
) -> Batch:
    """Encode a task's inputs as one batch, padded on the right to the largest.

    encoder: encoder of the kind of input, e.g. the tokenizer.
    pairs: a second input per input, or None.
    size: truncate and pad to exactly this size instead.
    Raises the kind's InputError, also for an input that the model cannot read.
    """
    kind = look_up(contract).inputs
    encoded = kind.encode(contract, encoder, inputs, pairs, size)
    for i, one in enumerate(encoded):
        if one.problem:
            raise InputError(one.problem, where=f"{kind.name}s[{i}]", fix=one.fix)
    batch = kind.collate(contract, encoded, size)
    batch.encoder = encoder
    return batch


def decode(contract: Contract, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> Array:
    """Decode the model's outputs to the task's array, float32, such as logits or embeddings.

    outputs: outputs of the model by name
    inputs: input arrays of the model; they define which positions are padding, and a Batch also
        which ones are left out of the pooling

    Raises AnswerError for NaN or infinity outside the padding.
    """
    if contract.texts is not None and not set(look_up(contract).inputs.arrays) <= set(inputs):
        contract = contract.texts  # the bundle's second model ran
    record = look_up(contract)
    if record.answer_output in outputs:
        array = np.asarray(outputs[record.answer_output], np.float32)
        _check_finite(record.answer_output, array, np.ones(len(array), bool))
        return array
    raw = _read_output(contract, outputs, len(next(iter(inputs.values()))))
    real = record.inputs.real(inputs)
    _check_finite(record.output or "of the model", raw, real)
    pooled = inputs.pooled if isinstance(inputs, Batch) and inputs.skipped else real
    values = record.decode(contract, raw, pooled)
    if not isinstance(inputs, Batch):
        return values
    return record.of_request(contract, values, outputs, inputs)


def _read_output(contract: Contract, outputs: Mapping[str, Array], rows: int) -> Array:
    """Return the task's outputs, float32, joined along their last axis; of a task without one all
    outputs of the contract, each flattened per row. Raises BundleError if a name or shape is
    wrong."""
    task = look_up(contract)
    if not task.output:
        return _join_outputs(contract, outputs, rows)
    arrays: list[Array] = []
    for name, axes in {task.output: task.axes, **task.beside}.items():
        if name not in outputs:
            raise BundleError(
                "the model has no such output",
                where=f"output {name}",
                accepted=", ".join(outputs),
                fix=AGAIN,
            )
        raw = np.asarray(outputs[name], dtype=np.float32)
        labels = len(contract.labels or ()) if task.classifies else None
        fits = raw.ndim == len(axes) and len(raw) == rows
        fits = fits and labels in (None, raw.shape[-1])
        if fits and arrays:
            raw = raw.reshape(*raw.shape[: arrays[0].ndim - 1], -1)
        if not fits or (arrays and raw.shape[:-1] != arrays[0].shape[:-1]):
            raise BundleError(
                f"the model returned an array of shape {raw.shape}",
                where=f"output {name}",
                accepted=f"[{', '.join(axes)}] of {rows} rows"
                + (f" and {labels} labels" if task.classifies else ""),
                fix=AGAIN,
            )
        arrays.append(raw)
    return np.concatenate(arrays, -1) if task.beside else arrays[0]


def _join_outputs(contract: Contract, outputs: Mapping[str, Array], rows: int) -> Array:
    """Flatten all outputs of a task's model per row and join them, float32 (rows, numbers).

    Raises BundleError for a missing output or another shape.
    """
    parts = []
    for spec in contract.outputs:
        shape = (rows, *spec.axes[1:])
        array = outputs.get(spec.name)
        if array is None or array.shape != shape:
            raise BundleError(
                "the model has no such output"
                if array is None
                else f"the model returned an array of shape {array.shape}",
                where=f"output {spec.name}",
                accepted=f"shape {list(shape)}",
                fix=AGAIN,
            )
        parts.append(np.asarray(array, np.float32).reshape(rows, -1))
    return np.concatenate(parts, axis=1)


def _check_finite(name: str, raw: Array, real: Array) -> None:
    wrong = ~np.isfinite(raw)
    if not wrong.any():  # the usual case, and cheap
        return
    if raw.shape[: real.ndim] == real.shape:
        wrong &= real.reshape(*real.shape, *[1] * (raw.ndim - real.ndim))
    rows = np.flatnonzero(wrong.reshape(len(raw), -1).any(1))
    if len(rows):
        raise AnswerError(
            f"{int(wrong.sum())} values are NaN or infinite, the first in row {rows[0]}",
            where=f"output {name}",
        )


def build_answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Build the task's answers: one JSON object per input from decode's array; its keys are in the
    task's file.

    Raises BundleError, with the line, where a task of another package raises an error or returns
    another number of answers.
    """
    task = look_up(contract)
    if contract.task in TASKS:
        return task.answers(contract, values, batch)
    fix = "Correct the task's function `answers`, and run the recipe again."
    try:
        built = task.answers(contract, values, batch)
    except Exception as e:
        at = extract_tb(e.__traceback__)[-1]
        place = f"task {contract.task}: {Path(at.filename).name}:{at.lineno}"
        raise BundleError(f"{type(e).__name__}: {e}", where=place, fix=fix) from e
    if len(built) != len(values):
        count = f"{len(built)} answers to {len(values)} rows"
        raise BundleError(count, where=f"task {contract.task}", accepted="one for each", fix=fix)
    return built
