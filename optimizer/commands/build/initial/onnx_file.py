"""Look at an ONNX file and at rows of arrays for `optimize init`."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.commands.build.initial.model import ModelFacts
from optimizer.commands.build.initial.parts import check_number, split_rows, write_part
from optimizer.commands.build.initial.rows import DataFacts
from optimizer.data import arrays
from optimizer.data.tables import NPZ
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.inputs.tensors import TensorRow
from optimizer.harness.tasks import tensors
from optimizer.load import source
from optimizer.load.onnx_model import files, stage
from optimizer.load.onnx_model.files import SUFFIX
from optimizer.recipe.schema import Model

ANY_SIZE = 32
"""Size that is proposed for an axis that the file leaves open."""


def is_file(name: str, task: str | None) -> bool:
    """Return True where `optimize init` is given an ONNX file, a folder with one and without
    config.json, or a task of ONNX files."""
    path = Path(name).expanduser()
    folder = path.is_dir() and not (path / "config.json").is_file()
    return (
        (task is not None and tasks.find_task(task).of_file)
        or path.suffix == SUFFIX
        or (folder and any(path.glob(f"*{SUFFIX}")))
    )


def look(name: str, task_name: str | None = None) -> ModelFacts:
    """Find for `optimize init` the facts about an ONNX file; one on a hub is not fetched.

    task_name: task of the file; None: tensors

    Raises CheckpointError as load for a file that it refuses.
    """
    task = tasks.find_task(task_name or tensors.TASK.name)
    section = Model(source=name, task=task.name)
    files.check_exists(section)
    if not source.is_local(name):
        return ModelFacts(name, task)
    open_axes = stage.open_axes(section)
    settings: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    if open_axes:
        sizes = dict.fromkeys(open_axes, ANY_SIZE)
        section = section.model_copy(update={"axes": sizes})
        settings = (f"axes: {json.dumps(sizes)}",)
        decisions = (
            f"the file leaves the size of {', '.join(open_axes)} open: set axes to the sizes of "
            "your data, which all rows share",
        )
    stage.open_file(section)
    return ModelFacts(
        name,
        task,
        folder=files.find(section).path.parent,
        convolves=True,  # rtn: no norm is recognised that another method would fold into
        settings=settings,
        decisions=decisions,
    )


def describe_absent(model: ModelFacts) -> DataFacts:
    """Return the data that a recipe for an ONNX file needs, with what to bring as a decision."""
    bring = (
        "bring two files beside this recipe with an array per input, named as the input, whose "
        f"first axis is the row; or let optimize init {model.name} --data rows.npz make them",
        "calibrate.npz: 256 rows or more like those in production",
        "evaluate.npz: 500 rows or more, none of them in calibrate.npz; with an array of class ids "
        "(columns: label: NAME) also metric accuracy",
    )
    named = {"calibrate": ("calibrate.npz", 0), "evaluate": ("evaluate.npz", 0)}
    return DataFacts(NPZ, named, {"arrays": arrays.ALL}, "cosine", (), bring)


def look_at_rows(file: Path, folder: Path, recipe_folder: Path, model: ModelFacts) -> DataFacts:
    """Split for a new recipe the rows of an .npz file into parts in `folder`; return what the
    recipe names. Raises DataError for another file, too few rows, arrays that are not those of the
    model's inputs, and a part that exists with another content."""
    if file.suffix != ".npz" or not file.is_file():
        raise DataError(
            f"{str(file)!r} is not an .npz file",
            where="--data",
            accepted="numpy.savez of an array per input, whose first axis is the row",
        )
    table = arrays.open_files([file])
    rows = list(table)
    check_number(rows, file)
    columns, metric = _columns(rows, file, model)
    label = columns.get("label")
    unlabelled = [{n: a for n, a in row.items() if n != label} for row in rows]
    keys = [[TensorRow(row).sha256] for row in unlabelled]
    parts = split_rows(keys, [None] * len(rows), len(rows))
    named = {}
    for part, at in parts.items():
        read_rows = rows if part == "evaluate" else unlabelled
        chosen = [read_rows[i] for i in at]
        name = write_part(folder / f"{part}.npz", _npz(chosen), recipe_folder)
        named[part] = name, len(at)
    return DataFacts(NPZ, named, columns, metric)


def _columns(
    rows: Sequence[Mapping[str, Any]], file: Path, model: ModelFacts
) -> tuple[dict[str, str], str]:
    """Choose for a new recipe ({field of a recipe's `columns`: array}, metric) for rows of arrays.

    An array beside the inputs with one whole number per row is taken as labels.

    Raises DataError for rows that lack an input, or have another array.
    """
    everything = {"arrays": arrays.ALL}
    if model.folder is None:
        return everything, "cosine"
    opened = files.read(files.find(Model(source=model.name, task=model.task.name)).path)
    inputs = [value.name for value in files.inputs(opened)]
    missing = [n for n in inputs if n not in rows[0]]
    others = [n for n in rows[0] if n not in inputs]
    if len(inputs) == len(missing) == len(others) == 1:
        return {"arrays": others[0]}, "cosine"
    if len(others) == 1 and not missing:
        label = np.asarray(rows[0][others[0]])
        if label.ndim == 0 and label.dtype.kind in "iu" and len(opened.graph.output) == 1:
            return {**everything, "label": others[0]}, "accuracy"
    if missing or others:
        problem = f"it has no array {missing[0]!r}" if missing else f"{others[0]!r} is not an input"
        raise DataError(
            problem,
            where=f"--data {file}",
            accepted=f"arrays {', '.join(inputs)}; and for a model of one output, of class scores, "
            "one of class ids",
        )
    return everything, "cosine"


def _npz(rows: Sequence[Mapping[str, Any]]) -> bytes:
    content = io.BytesIO()
    stacked: Any = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    np.savez(content, **stacked)
    return content.getvalue()
