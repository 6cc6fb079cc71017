"""Load an ONNX file as a checkpoint.

out/checkpoint/config.json        {"model_type": "onnx", ...}, see _config
out/checkpoint/model.safetensors  weights under the file's names
out/checkpoint/graph/             the graph (model/graph/record.py)
out/original/                     the file as it is, with its external data: the reference; of one
                                  in float16 the file in float32 (widen.py); up to the tensors of
                                  model.outputs where they are inside it (inner_outputs.py)
out/origin.json                   of such a file and of a torch module: how far its answers lie from
                                  the graph's (reference.py: compare), hop `origin` of the ledger
out/contract.json, source.json    as of any model

The float model is in memory several times (OPENED in model/graph/needs.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import inliner, numpy_helper, shape_inference, version_converter

from optimizer.foundation import safetensors_stream
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.process import machine_speed, resident
from optimizer.foundation.reading import quote_error, reading
from optimizer.harness import tasks
from optimizer.harness.contract import SECTIONS, VERSION, Contract
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.tasks.images import detector
from optimizer.harness.tasks.images.object_detection import BOX
from optimizer.load.onnx_model import draft as drafts
from optimizer.load.onnx_model import (
    files,
    inner_outputs,
    passes,
    ports,
    reference,
    refusals,
    widen,
)
from optimizer.load.onnx_model.channels_first import keep_channels_first
from optimizer.load.onnx_model.draft import Array, Draft
from optimizer.load.onnx_model.files import OnnxFile
from optimizer.load.onnx_model.finish import Finished, finish
from optimizer.load.onnx_model.reference import Origin
from optimizer.model.graph import needs, record
from optimizer.model.graph.needs import BESIDE, OPENED, GraphShapes
from optimizer.recipe.answers import ImageInput
from optimizer.recipe.schema import Model
from optimizer.store import Estimate, Shapes

OPSET = 21  # of the graph, unless the file has a later one
FIRST_MODES = 11  # opset whose Resize names its coordinates
SMALL = 64  # values of an initializer that is passed to the version converter
START = 5  # seconds of imports
LIBRARIES = 270_000_000  # bytes of memory before a file is opened, where it cannot be measured
PASSES = 7  # of the drawn rows: two in ONNX Runtime, five in torch
MOVED = 300  # bytes moved per byte of the file: read, copied, written (measured)
ROUNDING = 2.0**-10  # of a float16 next to 1
MULTIPLY = ("Conv", "ConvTranspose", "MatMul", "Gemm", "LSTM", "GRU", "RNN", "Einsum")
ORIGINAL = "original"
ORIGIN = "origin.json"


@dataclass(frozen=True)
class Opened:
    """An ONNX file in the final form that load gives it, in memory.

    half: True for a file in float16
    rewritten: initializers of a file that the reference is not a copy of, because it was in
        float16, or because inner tensors became its outputs; else None
    """

    source: OnnxFile
    model: onnx.ModelProto
    draft: Draft
    ports: ports.Ports
    finished: Finished
    half: bool = False
    rewritten: Mapping[str, Array] | None = None


def open_file(section: Model) -> Opened:
    """Read, check and convert the recipe's ONNX file for load; nothing is run. Raises
    CheckpointError."""
    file = files.find(section)
    with reading(file.path, own_faults=True):
        model = files.read(file.path)
        cut = inner_outputs.cut(model, section.outputs)
        files.data_files(model, file.path)
        refusals.check(model, file.path)
        if model.functions:
            model = inliner.inline_local_functions(model)
            refusals.check_nodes(model, file.path)
        files.load_attributes(model, file.path)
        arrays = files.arrays(model, file.path)
        half = widen.is_half(model)
        if half and cut:
            raise RecipeError(
                "a tensor inside a file in float16 was named",
                where="model.outputs",
                accepted="outputs of the file",
                fix="Export the model in float32.",
            )
        if half:
            widen.widen(model, arrays)
        refusals.check_values(arrays, model.graph.node, file.path)
        converted, opset = _converted(model, arrays, file.path)
        added = {t.name: numpy_helper.to_array(t) for t in converted.graph.initializer}
        draft = drafts.of_proto(converted, added | arrays, opset)
        undefined = {n: a for n, a in draft.constants.items() if refusals.holds_nan(a)}
        refusals.check_values(undefined, converted.graph.node, file.path)
        draft.outputs = list(dict.fromkeys(section.outputs)) or draft.outputs
        inputs = ports.read(model, draft, section, file.path)
        draft.shapes |= _shapes(converted, inputs, arrays)
        for step in (
            passes.drop_unread_outputs,
            passes.fold_constants,
            passes.drop_identities,
            passes.explicit_padding,
            keep_channels_first,
            passes.fold_padding,
            passes.fold_affine,
        ):
            step(draft)
        ports.free_batch(draft, inputs)
        passes.find_products(draft)
        draft.remove_unread()
        passes.free_names(draft)
        refusals.check_random(draft, file.path)
        refusals.check_finite(draft, file.path)
        if not any(n.module for n in draft.nodes):
            raise CheckpointError(
                "it has no MatMul or Gemm whose right operand is a constant matrix, and no Conv "
                f"of images by constant filters, so there is nothing to compress{_nearest(draft)}",
                where=str(file.path),
            )
        rewritten = arrays if half or cut else None
        return Opened(file, model, draft, inputs, finish(draft), half, rewritten)


def _nearest(draft: Draft) -> str:
    """Describe the loaded ONNX file's first operator that multiplies by weights and stays float."""
    node = next((n for n in draft.nodes if n.domain or n.op in MULTIPLY), None)
    return f"; node {node.name!r} ({node.op}) stays float" if node else ""


def open_axes(section: Model) -> list[str]:
    """List the axes whose size neither the ONNX file nor the recipe gives, as keys of
    model.axes."""
    file = files.find(section)
    model = files.read(file.path)
    refusals.check(model, file.path)
    return [key for value in files.inputs(model) for key in ports.open_axes(value, section)]


def _converted(
    model: onnx.ModelProto, arrays: Mapping[str, Array], path: Path
) -> tuple[onnx.ModelProto, int]:
    """Convert an ONNX file that is loaded to a later opset: (the model without initializers of more
    than SMALL values, in opset OPSET or its own later one; that opset)."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.initializer[:]
    known = {i.name for i in light.graph.input}
    for name, array in arrays.items():
        if array.size <= SMALL:
            light.graph.initializer.append(numpy_helper.from_array(array, name))
        if name not in known:
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            light.graph.input.append(onnx.helper.make_tensor_value_info(name, kind, array.shape))
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), OPSET)
    if opset >= OPSET:
        return light, opset
    try:
        converted = version_converter.convert_version(light, OPSET)
        if opset < FIRST_MODES:
            _resize_as_before(converted)
        return converted, OPSET
    except Exception as e:  # the converter raises errors of several libraries
        raise CheckpointError(
            f"onnx.version_converter does not convert opset {opset} to {OPSET} ({quote_error(e)})",
            where=str(path),
            fix=f"Export the model with opset_version {OPSET}.",
        ) from e


def _resize_as_before(converted: onnx.ModelProto) -> None:
    """Give each Resize of a converted ONNX file the coordinates of Upsample and of opset 10, which
    the converter leaves out: the position of the nearest pixel is rounded down in an enlarged
    image, up in a reduced one.
    """
    values = {t.name: numpy_helper.to_array(t) for t in converted.graph.initializer}
    for node in converted.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    for node in converted.graph.node:
        if node.op_type == "Resize" and not any(
            a.name == "coordinate_transformation_mode" for a in node.attribute
        ):
            scales = values.get(node.input[2])
            smaller = scales is not None and (scales < 1).any()
            node.attribute.extend(
                [
                    onnx.helper.make_attribute("coordinate_transformation_mode", "asymmetric"),
                    onnx.helper.make_attribute("nearest_mode", "ceil" if smaller else "floor"),
                ]
            )


def _shapes(
    model: onnx.ModelProto, inputs: ports.Ports, arrays: Mapping[str, Array]
) -> dict[str, drafts.Shape]:
    """Return {tensor of a loaded ONNX file: shape} as far as onnx infers it, with the sizes of the
    recipe and one row."""
    sized = onnx.ModelProto()
    sized.CopyFrom(model)
    by_name = {p.name: p for p in inputs.inputs}
    for value in sized.graph.input:
        if value.name in by_name:
            dims = value.type.tensor_type.shape.dim
            for dim, size in zip(dims, (1, *by_name[value.name].shape), strict=True):
                dim.Clear()
                dim.dim_value = size
    del sized.graph.value_info[:]
    inferred = shape_inference.infer_shapes(sized, data_prop=True).graph
    shapes = drafts.shapes_of((*inferred.value_info, *inferred.input))
    return shapes | {n: a.shape for n, a in arrays.items()}


def run(section: Model, out: Path, origin: Origin | None = None) -> None:
    """Load an ONNX file: write the stage's files. origin: model that the file was exported from,
    whose answers are expected too. Raises CheckpointError or RecipeError."""
    opened = open_file(section)
    path = opened.source.path
    if opened.half:
        origin = widen.HalfFile(path)
    expected = _answers(opened, out)
    document = contract(section, opened, expected)
    checkpoint = out / "checkpoint"
    checkpoint.mkdir()
    tensors = {n: torch.from_numpy(a.copy()) for n, a in opened.finished.parameters.items()}
    graph = _graph(opened, checkpoint)
    graph.folder.mkdir()
    graph = reference.runnable(graph, opened.draft, tensors, opened.ports)
    try:
        compared = reference.compare(graph, tensors, opened.ports, expected, path, origin)
    except CheckpointError as e:
        exact = reference.without_misread(graph, opened.draft, tensors, opened.ports)
        if exact is graph:
            raise reference.with_node(e, graph, tensors, opened.ports) from e
        graph = exact
        compared = reference.compare(graph, tensors, opened.ports, expected, path, origin)
    graph = reference.measured(graph, tensors, opened.ports)
    record.write(graph, checkpoint)
    safetensors_stream.write(iter(tensors.items()), checkpoint / "model.safetensors")
    _write_json(checkpoint / "config.json", config(opened, section))
    _write_json(out / "contract.json", document)
    if compared is not None:
        _write_json(out / ORIGIN, compared)
    if opened.rewritten is None:
        _copy_original(path, out / ORIGINAL)
    _write_json(
        out / "source.json",
        {
            **files.origin(section),
            "task": section.task,
            "licence": "",
            "model_type": record.MODEL_TYPE,
            "architecture": opened.model.graph.name or path.stem,
            "parameters": sum(t.numel() for t in tensors.values()),
            "unused": [],
        },
    )


def check(section: Model, out: Path) -> Opened:
    """Write contract.json only, after running the file in ONNX Runtime; return the opened file."""
    opened = open_file(section)
    _write_json(out / "contract.json", contract(section, opened, _answers(opened, out)))
    (out / "checkpoint").mkdir(exist_ok=True)
    return opened


def _answers(opened: Opened, out: Path) -> tuple[list[reference.Answers], reference.Answers]:
    """A loaded ONNX file's reference.answers, after the reference was written, if it is not a
    copy."""
    path = opened.source.path
    if opened.rewritten is not None:
        path = out / ORIGINAL / "model.onnx"
        widen.write(opened.model, opened.rewritten, path)
    return reference.answers(path, opened.ports, opened.draft.outputs, opened.model)


def _graph(opened: Opened, checkpoint: Path) -> record.Graph:
    return record.Graph(
        tuple(opened.draft.inputs),
        tuple(opened.draft.outputs),
        opened.draft.opset,
        opened.finished.nodes,
        opened.finished.constants,
        checkpoint / record.FOLDER,
        {n: tuple(a.shape) for n, a in opened.finished.parameters.items()},
    )


def graph_of(opened: Opened) -> record.Graph:
    """Return the graph of an opened file, from which a model without weights can be built."""
    return _graph(opened, Path())


def contract(
    section: Model, opened: Opened, expected: tuple[list[dict[str, Array]], dict[str, Array]]
) -> dict[str, Any]:
    """Build contract.json of a loaded ONNX file."""
    alone, together = expected

    def label(name: str) -> str:
        return f"{opened.source.path}: {refusals.output(name, opened.model)}"

    outputs = ports.outputs_document(alone[0], together, label)
    for name, array in together.items():
        if not all(np.isfinite(a).all() for a in (array, alone[0][name])):
            raise CheckpointError(
                f"it holds NaN or infinity for drawn rows{_first_undefined(opened)}",
                where=label(name),
                accepted="finite numbers",
                fix="Set model.ranges of the inputs to values that the model takes. "
                f"{ports.CHOOSE_OUTPUTS}",
            )
    document: dict[str, Any] = {
        "version": VERSION,
        "task": section.task,
        "input_kind": tasks.find_task(section.task).inputs.name,
        "inputs": ports.as_document(opened.ports),
        "outputs": outputs,
        **dict.fromkeys(SECTIONS),
        **detector_sections(section, opened),
    }
    checked = Contract.from_json(document)
    tasks.check(checked)
    if checked.detections is not None:
        check_fields(checked, together)
    return document


def check_fields(contract: Contract, rows: dict[str, Array]) -> None:
    """Raise RecipeError where a detector's outputs cannot hold what `model.detections` says:
    probabilities beyond 0 to 1, label ids that are not whole, or boxes in the other unit.

    rows: {output: array of the drawn rows}
    """
    settings = contract.candidates
    joined = np.concatenate([rows[o.name].reshape(ports.ROWS, -1) for o in contract.outputs], 1)
    fields = np.concatenate([detector.join_fields(contract, row) for row in joined])
    boxes, scores, ids = fields[:, :BOX], fields[:, BOX:], np.empty(0)
    if settings.layout == "final":
        known = (fields[:, -1] >= 0) & (fields[:, -1] < len(contract.labels or ()))
        scores, ids = fields[known, BOX:-1], fields[known, -1]
    sizes = np.abs(boxes[boxes.any(1)])  # a graph that chooses pads with zeros
    problem = fix = ""
    if settings.activation == "none" and (np.abs(scores - 0.5) > 0.5 + ROUNDING).any():
        problem = f"probabilities from {scores.min():.3g} to {scores.max():.3g}"
        fix = "Set activation to sigmoid or softmax if they are logits"
    elif (ids != np.rint(ids)).any():
        problem = f"label ids such as {ids[ids != np.rint(ids)][0]:.3g}"
        fix = "Give the outputs in the order box, probability, label id"
    elif sizes.size and settings.units == "pixels" and sizes.max() <= 1:
        problem, fix = "no box that reaches beyond one pixel", "Set units to share"
    elif sizes.size and settings.units == "share" and float(np.median(sizes)) > 1:
        problem = f"boxes of {float(np.median(sizes)):.3g} sides of the image"
        fix = "Set units to pixels"
    if problem:
        raise RecipeError(
            f"read so, the outputs of drawn images hold {problem}",
            where="model.detections",
            accepted="probabilities of 0 to 1, whole label ids, boxes in the unit of `units`",
            fix=f"{fix}, or check layout, labels, and the order in model.outputs (boxes first).",
        )


def detector_sections(section: Model, opened: Opened) -> dict[str, Any]:
    """Return the sections of contract.json that a detector has: images, labels, and boxes in its
    outputs; {} for another task. Raises CheckpointError for inputs other than one of images."""
    if section.detections is None:
        return {}
    inputs = opened.ports.inputs
    shapes = {p.name: p.shape for p in inputs if p.dtype == "float32"}
    fits = len(inputs) == 1 and all(len(s) == 3 and s[0] in (1, 3) for s in shapes.values())
    if not fits or not shapes:
        raise CheckpointError(
            f"its inputs are {', '.join(f'{p.name} {p.dtype} {list(p.shape)}' for p in inputs)}",
            where=str(opened.source.path),
            accepted="for task detector one input of float32, (1 or 3 channels, height, width)",
            fix="Export the model with images as its only input, channels first; or use task "
            "tensors.",
        )
    (shape,) = shapes.values()
    settings = (section.image or ImageInput()).settings(*shape)
    return {
        "image": settings.to_json(),
        "labels": list(section.detections.labels),
        "detections": asdict(section.detections.settings()),
    }


def _first_undefined(opened: Opened) -> str:
    """Describe the first node of a loaded ONNX file that makes NaN or infinity for drawn rows."""
    with _skeleton(opened) as (graph, tensors):
        node = reference.first_undefined(graph, tensors, opened.ports)
    return f"; first behind node {node.name!r} ({node.op})" if node else ""


@contextmanager
def _skeleton(opened: Opened) -> Iterator[tuple[record.Graph, dict[str, torch.Tensor]]]:
    """The graph of a loaded ONNX file, in a folder while it is in use, and its tensors."""
    tensors = {n: torch.from_numpy(a.copy()) for n, a in opened.finished.parameters.items()}
    with make_temporary_folder("graph") as folder:
        graph = _graph(opened, folder)
        graph.folder.mkdir()
        ignore = lambda _: None  # noqa: E731 - load says which nodes stay float
        yield reference.runnable(graph, opened.draft, tensors, opened.ports, ignore), tensors


def config(opened: Opened, section: Model) -> dict[str, Any]:
    """Build config.json of a loaded ONNX file: {"model_type", "modules", "marks", "left", "norms",
    "equalized", "single", "ranges"}, and "id2label" of a detector; see finish.Finished,
    ports.Ports, and drawn.DrawnInput for the ranges of drawn inputs."""
    labels = section.detections.labels if section.detections else ()
    return {
        **({"id2label": dict(enumerate(labels))} if labels else {}),
        "model_type": record.MODEL_TYPE,
        "modules": list(opened.finished.modules),
        "marks": [list(mark) for mark in opened.finished.marks],
        "left": opened.finished.left,
        "norms": [[path, list(readers)] for path, readers in opened.finished.norms],
        "equalized": [[path, list(readers)] for path, readers in opened.finished.equalized],
        "single": opened.ports.single,
        "ranges": {p.name: [p.low, p.high] for p in opened.ports.inputs},
    }


def _copy_original(path: Path, folder: Path) -> None:
    for name, file in files.by_name(path).items():
        target = folder / (name if file != path else "model.onnx")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _write_json(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def shapes(section: Model) -> Shapes:
    """Return {parameter: shape} under the load stage's names, with the needs of the graph's parts,
    for which drawn rows go through the torch model."""
    libraries = resident.anonymous(LIBRARIES)
    opened = open_file(section)
    with _skeleton(opened) as (graph, tensors):
        graph = reference.measured(graph, tensors, opened.ports)
        parts, rounded = reference.needs(graph, tensors, opened.ports)
    modules = tuple(f"{record.BODY}.{name}" for name in opened.finished.modules)
    size = 4 * sum(map(prod, graph.parameters.values()))
    copies = OPENED - (OPENED - BESIDE) * _share_beside(opened)
    return GraphShapes(graph.parameters, parts, modules, rounded, libraries, round(copies * size))


def _share_beside(opened: Opened) -> float:
    """Share of a loaded ONNX file's bytes that are external data; 0 of a file that is not
    copied."""
    path = opened.source.path
    beside = sum(f.stat().st_size for f in files.data_files(files.read(path), path))
    return 0.0 if opened.rewritten is not None else beside / (beside + path.stat().st_size)


def estimate(shapes: Shapes, imports: int) -> Estimate:
    """Estimate stage load for an ONNX file. Memory: the float model with its copies, beside the
    imports, and that of correct runs; disk: twice; time: the correct runs of the drawn rows, and
    PASSES of them."""
    size = 4 * sum(prod(s) for s in shapes.values())
    seconds = START + machine_speed.measure().move(MOVED * size)
    memory = needs.libraries_of(shapes, imports)
    if isinstance(shapes, GraphShapes):
        seconds += shapes.rounded.seconds(ports.ROWS) + PASSES * ports.ROWS * shapes.seconds
        memory += shapes.rounded.memory + shapes.opened
    else:
        memory += OPENED * size
    return Estimate(memory=memory, disk=2 * size, seconds=seconds)
