"""Inputs and outputs of an ONNX file: their types, sizes and drawn values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from optimizer.foundation.errors import CheckpointError, RecipeError, suggest
from optimizer.harness.contract import DTYPES
from optimizer.harness.inputs.image import value_table
from optimizer.load.onnx_model.draft import Draft
from optimizer.load.onnx_model.passes import PARAMETERS
from optimizer.model.graph.drawn import DrawnInput, draw
from optimizer.recipe.answers import ImageInput
from optimizer.recipe.schema import Model

Array = NDArray[Any]
CHOOSE_OUTPUTS = "Name the outputs to keep, or tensors inside the file: model.outputs: [...]."
BATCH = "batch"
RESERVED = ("self", "return_dict")
"""Parameters of a torch module's call."""
SAME_VALUES = ("Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose")
ROWS = 8  # of the drawn batch; fewer give a limit that is too wide to show much


@dataclass(frozen=True)
class Ports:
    """All inputs of an ONNX file that is loaded. single: True for a file that takes batches of one
    row only"""

    inputs: tuple[DrawnInput, ...]
    single: bool

    def draw(self, rows: int, seed: int = 0) -> dict[str, Array]:
        """Draw rows on which load checks an ONNX file, {input: array of `rows` rows}, the same for
        the same seed."""
        return draw(self.inputs, rows, seed)


def read(model: onnx.ModelProto, draft: Draft, section: Model, path: Path) -> Ports:
    """Read the inputs of an ONNX file that is loaded. Raises CheckpointError for a type or an axis
    that is not covered, RecipeError for a key of model.axes or model.ranges that the file does not
    have."""
    values = {v.name: v for v in model.graph.input if v.name in draft.inputs}
    ports, firsts, used = [], dict[int | None, str](), set[str]()
    for name in draft.inputs:
        value = values[name]
        tensor = value.type.tensor_type
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)).name
        where = f"{path}: input {name!r}"
        if dtype not in DTYPES or dtype == "float16":
            raise CheckpointError(
                f"it is {dtype}",
                where=where,
                accepted="float32, int64, int32",
                fix="Export the model with inputs of these types.",
            )
        if name in RESERVED or name.startswith(PARAMETERS):
            raise CheckpointError(
                "the name has another meaning here",
                where=where,
                accepted=f"names other than {', '.join(RESERVED)} and {PARAMETERS}*",
                fix="Export the model with input_names.",
            )
        dims = list(tensor.shape.dim)
        if not dims:
            raise CheckpointError(
                "it has no axis", where=where, accepted="the rows of a batch as the first axis"
            )
        firsts.setdefault(dims[0].dim_value if dims[0].HasField("dim_value") else None, name)
        shape = [_size(name, i, dim, section, path, used) for i, dim in enumerate(dims[1:], 1)]
        low, high = _range(name, dtype, draft, section)
        ports.append(DrawnInput(name, dtype, tuple(shape), low, high))
    unknown = sorted({*section.axes} - used) or sorted({*section.ranges} - {*draft.inputs})
    if unknown:
        place = "axes" if unknown[0] in section.axes else "ranges"
        known = [*used, *draft.inputs]
        raise RecipeError(
            f"the file has no {unknown[0]!r}{suggest(unknown[0], known)}",
            where=f"model.{place}",
            accepted=", ".join(draft.inputs),
        )
    for rows, name in firsts.items():
        if rows in (None, 1):
            continue
        raise CheckpointError(
            f"the file takes batches of {rows} rows only",
            where=f"{path}: input {name!r}",
            accepted="a first axis that is dynamic, or 1",
            fix="Export the model with a dynamic first axis.",
        )
    return Ports(tuple(ports), 1 in firsts)


def _size(name: str, at: int, dim: Any, section: Model, path: Path, used: set[str]) -> int:
    """Return the size of axis `at` of a loaded ONNX file's input, by the file or model.axes; adds
    its keys there to `used`."""
    keys = [f"{name}.{at}", *([dim.dim_param] if dim.dim_param else [])]
    used.update(k for k in keys if k in section.axes)
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    size = next((section.axes[k] for k in keys if k in section.axes), None)
    if size is None:
        shown = keys[-1]
        raise CheckpointError(
            f"axis {at} ({dim.dim_param or 'without a name'}) has no fixed size",
            where=f"{path}: input {name!r}",
            accepted="a size for every axis but the first: rows are arrays of one shape",
            fix=f'Set model.axes: {{"{shown}": SIZE}} to the size of your data.',
        )
    return size


def open_axes(value: Any, section: Model) -> list[str]:
    """List the keys of model.axes that an ONNX file's input lacks: names of its axes, else
    "input.index"."""
    keys = []
    for at, dim in enumerate(value.type.tensor_type.shape.dim):
        place = f"{value.name}.{at}"
        known = dim.HasField("dim_value") or {place, dim.dim_param} & {*section.axes}
        keys += [] if not at or known else [dim.dim_param or place]
    return list(dict.fromkeys(keys))


def _range(
    name: str, dtype: str, draft: Draft, section: Model
) -> tuple[float, float] | tuple[None, None]:
    """Return the range to draw a loaded ONNX file's input from: the recipe's, else that of images,
    or the rows of the tables it reads."""
    if name in section.ranges:
        return section.ranges[name]
    if section.detections is not None:
        image = section.image or ImageInput()
        values = value_table(image.rescale, 0.0, image.mean, image.std, None)
        return float(values.min()), float(values.max())
    if np.dtype(dtype).kind == "f":
        return None, None
    tables = [
        draft.constants[node.inputs[0]]
        for node in draft.nodes
        if node.op == "Gather" and name in _behind(node.inputs[1], draft)
        if node.inputs[0] in draft.constants
    ]
    rows = min((len(t) for t in tables if t.ndim > 1), default=2)
    return 0, rows - 1


def _behind(name: str, draft: Draft) -> set[str]:
    """Find in a loaded ONNX file the tensor and those that it has its values from."""
    maker = next((n for n in draft.nodes if name in n.outputs and n.op in SAME_VALUES), None)
    return {name} if maker is None else {name, *_behind(maker.inputs[0], draft)}


def free_batch(draft: Draft, ports: Ports) -> None:
    """Let a loaded ONNX file of one row take several: a Reshape to a constant shape that begins
    with the row keeps its first axis."""
    if not ports.single:
        return
    for node in draft.nodes:
        shape = draft.constants.get(node.inputs[1]) if node.op == "Reshape" else None
        before = draft.shapes.get(node.inputs[0]) if shape is not None else None
        if shape is None or shape.size < 1 or shape[0] != 1 or node.attributes.get("allowzero"):
            continue
        if before and before[0] == 1:
            name = draft.fresh(f"{node.name}/shape")
            draft.constants[name] = np.concatenate([[0], shape[1:]]).astype(np.int64)
            node.inputs[1] = name


def as_document(ports: Ports) -> list[dict[str, Any]]:
    """Return the list of inputs for contract.json."""
    return [{"name": p.name, "dtype": p.dtype, "axes": [BATCH, *p.shape]} for p in ports.inputs]


def outputs_document(
    one: Mapping[str, Array], several: Mapping[str, Array], label: Callable[[str], str]
) -> list[dict[str, Any]]:
    """The outputs of a contract, from answers to one row and to ROWS. label: text for an output by
    its name. Raises CheckpointError for an output that is not an array per row of one size and of
    floats."""
    document = []
    for name, array in several.items():
        where = label(name)
        if name.startswith(PARAMETERS):
            raise CheckpointError(
                f"names that begin with {PARAMETERS!r} are those of parameters here",
                where=where,
                accepted="another name",
                fix="Export the model with output_names.",
            )
        if array.dtype != np.float32:
            raise CheckpointError(
                f"it is {array.dtype}", where=where, accepted="float32", fix=CHOOSE_OUTPUTS
            )
        if array.shape != (ROWS, *one[name].shape[1:]) or len(one[name]) != 1:
            raise CheckpointError(
                f"its shape is {one[name].shape} for one row and {array.shape} for {ROWS}",
                where=where,
                accepted="the rows of the batch as the first axis, and fixed sizes behind it",
                fix=CHOOSE_OUTPUTS,
            )
        document.append({"name": name, "dtype": "float32", "axes": [BATCH, *array.shape[1:]]})
    return document
