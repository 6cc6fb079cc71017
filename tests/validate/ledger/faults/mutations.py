"""Plant faults in the artefacts of a run: each edits one folder in place."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from optimizer.compress.apply.weights import bias_correction
from optimizer.foundation import state as compressed_state
from optimizer.foundation.qtensor import QTensor, quantize
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.onnx.cut import PRODUCTS
from optimizer.lower.ort.product import OPERATOR
from tests.validate.runs import Run

QUERY = "encoder.layer.0.attention.self.query"
KEY = "encoder.layer.0.attention.self.key"
OUTPUT = "encoder.layer.1.output.dense"
NORM = "encoder.layer.0.output.LayerNorm"

Edit = Callable[[Run], None]


def edit_state(change: Callable[[CompressedState], CompressedState]) -> Edit:
    def edit(run: Run) -> None:
        folder = run.folder("state")
        found = compressed_state.read(folder)
        held = replace(
            found,
            weights=dict(found.weights),
            replaced={n: t.clone() for n, t in found.replaced.items()},
            factors={n: t.clone() for n, t in found.factors.items()},
        )
        compressed_state.write(change(held), folder)

    return edit


def weight(module: str, change: Callable[[QTensor], QTensor]) -> Edit:
    """Change one quantized weight of the state."""
    name = f"{module}.weight"
    return edit_state(lambda s: replace(s, weights={**s.weights, name: change(s.weights[name])}))


def one_channel_doubled(q: QTensor) -> QTensor:
    scale = q.scale.clone()
    scale[3] *= 2
    return replace(q, scale=scale)


def one_group_doubled(q: QTensor) -> QTensor:
    scale = q.scale.clone()
    scale[5, 1] *= 2
    return replace(q, scale=scale)


def one_group_halved(q: QTensor) -> QTensor:
    """Halve a group's scale; its integers saturate, so only the law of scales shows it."""
    value = q.dequantize()
    scale = q.scale.clone()
    scale[5, 1] /= 2
    return quantize(value, scale, q.zero_point, q.scheme)


def transposed(q: QTensor) -> QTensor:
    return replace(q, integers=q.integers.T.contiguous())


def nibbles_swapped(q: QTensor) -> QTensor:
    pairs = q.integers.reshape(q.integers.shape[0], -1, 2).flip(-1)
    return replace(q, integers=pairs.reshape(q.integers.shape))


def groups_shifted(q: QTensor) -> QTensor:
    return replace(q, scale=q.scale.roll(1, 1))


def site(module: str, change: Callable[[Range], Range]) -> Edit:
    name = f"{module}:input"
    return edit_state(lambda s: replace(s, ranges={**s.ranges, name: change(s.ranges[name])}))


def replaced(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Change the first replaced parameter with this suffix."""

    def edit(s: CompressedState) -> CompressedState:
        name = min(n for n in s.replaced if n.endswith(suffix))
        return replace(s, replaced={**s.replaced, name: change(s.replaced[name])})

    return edit_state(edit)


def corrections_negated(run: Run) -> None:
    """Negate each correction, and the sums that include it."""
    folder = run.folder("state")
    added = {name: value.clone() for name, value in bias_correction.read(folder).items()}
    bias_correction.write({name: -value for name, value in added.items()}, folder)

    def change(s: CompressedState) -> CompressedState:
        return replace(s, replaced={n: t - 2 * added.get(n, 0) for n, t in s.replaced.items()})

    edit_state(change)(run)


def factor(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    def edit(s: CompressedState) -> CompressedState:
        name = min(s.factors)
        return replace(s, factors={**s.factors, name: change(s.factors[name])})

    return edit_state(edit)


def edit_onnx(folder: str, change: Callable[[onnx.GraphProto], None]) -> Edit:
    def edit(run: Run) -> None:
        path = run.folder(folder) / "model.onnx"
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)

    return edit


def tensor(graph: onnx.GraphProto, name: str) -> onnx.TensorProto:
    return next(i for i in graph.initializer if i.name == name)


def node(graph: onnx.GraphProto, name: str) -> onnx.NodeProto:
    return next(n for n in graph.node if n.name == name)


def values(folder: str, name: str, change: Callable[[Any], Any]) -> Edit:
    """Change the values of one initializer, keeping its type."""

    def edit(graph: onnx.GraphProto) -> None:
        found = tensor(graph, name)
        old = numpy_helper.to_array(found)
        new = np.asarray(change(old.copy())).astype(old.dtype).reshape(old.shape)
        assert not np.array_equal(old, new), "the fault changes nothing"
        found.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(new).reshape(old.shape), name))

    return edit_onnx(folder, edit)


def swapped(folder: str, a: str, b: str) -> Edit:
    def edit(graph: onnx.GraphProto) -> None:
        x, y = tensor(graph, a), tensor(graph, b)
        x.name, y.name = b, a

    return edit_onnx(folder, edit)


def first_integer_moved(codes: Any) -> Any:
    codes.flat[0] += -1 if codes.flat[0] > 0 else 1
    return codes


def neighbours_swapped(codes: Any) -> Any:
    """Exchange neighbours, as the two nibbles of a byte."""
    return codes.reshape(-1, 2)[:, ::-1].reshape(codes.shape)


def row(index: int) -> Callable[[Any], Any]:
    def change(table: Any) -> Any:
        table[index] = table[index - 1]
        return table

    return change


def epsilon(folder: str, value: float) -> Edit:
    def edit(graph: onnx.GraphProto) -> None:
        found = node(graph, f"{NORM}/LayerNormalization")
        next(a for a in found.attribute if a.name == "epsilon").f = value

    return edit_onnx(folder, edit)


def mask_ignored(folder: str) -> Edit:
    def edit(graph: onnx.GraphProto) -> None:
        user = next(n for n in graph.node if "attention_mask" in n.input)
        graph.initializer.append(numpy_helper.from_array(np.array(1, np.int64), "one"))
        full = helper.make_node("Max", ["attention_mask", "one"], ["full_mask"], name="full_mask")
        user.input[list(user.input).index("attention_mask")] = "full_mask"
        graph.node.insert(list(graph.node).index(user), full)

    return edit_onnx(folder, edit)


def approximate_gelu(graph: onnx.GraphProto) -> None:
    gelu = next(n for n in graph.node if n.op_type == "Gelu")
    del gelu.attribute[:]
    gelu.attribute.append(helper.make_attribute("approximate", "tanh"))


def product(graph: onnx.GraphProto, module: str) -> onnx.NodeProto:
    """The operator that multiplies by the module's weight."""
    return next(n for n in graph.node if n.op_type in PRODUCTS and n.name.startswith(f"{module}/"))


def producer(graph: onnx.GraphProto, value: str) -> onnx.NodeProto:
    return next(n for n in graph.node if value in n.output)


def coding(which: int, change: Callable[[Any], Any]) -> Edit:
    """Change the scale (1) or the zero point (2) of the first static activation."""

    def edit(run: Run) -> None:
        graph = onnx.load(run.folder("model") / "model.onnx").graph
        name = next(n for n in graph.node if n.op_type == "QuantizeLinear").input[which]
        values("model", name, change)(run)

    return edit


def input_left_in_float(module: str) -> Edit:
    """Multiply the input of the module's quantizer; no file records that."""

    def change(graph: onnx.GraphProto) -> None:
        multiplies = product(graph, module)
        quantizer = producer(graph, producer(graph, multiplies.input[0]).input[0])
        multiplies.input[0] = quantizer.input[0]

    return edit_onnx("model", change)


def left_in_float(module: str) -> Edit:
    """Multiply by the module's float weight again; no file records that."""

    def edit(run: Run) -> None:
        path = run.folder("model") / "model.onnx"
        model, source = onnx.load(path), onnx.load(run.folder("graph") / "model.onnx")
        found = tensor(source.graph, f"{module}.weight")
        model.graph.initializer.append(found)
        multiplies = product(model.graph, module)
        if multiplies.op_type == OPERATOR:
            multiplies = in_plain_operators(model.graph, multiplies)
        multiplies.input[1] = found.name
        onnx.save(model, path)

    return edit


def in_plain_operators(graph: onnx.GraphProto, fused: onnx.NodeProto) -> onnx.NodeProto:
    """Write a product of integers with its bias as DequantizeLinear, MatMul and Add; returns the
    MatMul."""
    x, codes, scale, column_scale, zero, _, bias = fused.input
    name, (result,), place = fused.name, fused.output, list(graph.node).index(fused)
    made = [
        helper.make_node("DequantizeLinear", [x, scale, zero], [f"{name}/x"], f"{name}/x"),
        helper.make_node("DequantizeLinear", [codes, column_scale], [f"{name}/w"], axis=1),
        helper.make_node("MatMul", [f"{name}/x", f"{name}/w"], [f"{name}/y"], name),
        helper.make_node("Add", [f"{name}/y", bias], [result], f"{name}/Add"),
    ]
    for node in made:
        node.metadata_props.extend(fused.metadata_props)
    graph.node.remove(fused)
    for node in reversed(made):
        graph.node.insert(place, node)
    return product(graph, name.rpartition("/")[0])


def edit_json(folder: str, name: str, change: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(run: Run) -> None:
        path = run.folder(folder) / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return edit


def bundle_of(run: Run, root: Path) -> Path:
    """Copy the contract and the tokenizer as a bundle has them."""
    root.mkdir()
    (root / "contract.json").write_bytes((run.folder("source") / "contract.json").read_bytes())
    for file in (run.folder("source") / "checkpoint").glob("tokenizer*.json"):
        (root / file.name).write_bytes(file.read_bytes())
    return root


def edit_bundle(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(bundle: Path) -> None:
        document = json.loads((bundle / name).read_text())
        change(document)
        (bundle / name).write_text(json.dumps(document))

    return edit
