"""A convolution in both Q/DQ dialects is what the state computes, as onnxruntime runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import helper, numpy_helper
from torch import Tensor, nn

from optimizer.compress.convolutions import round_bias
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import QuantConvolution
from optimizer.export import names, onnx_file
from optimizer.export.scopes import MODULE
from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import CompressedState, Range, input_name
from optimizer.lower.onnx import cut, graph_constants
from optimizer.lower.onnx.graph_source import OpenGraph
from optimizer.lower.ort import qdq as ort_qdq
from optimizer.lower.trt import qdq as trt_qdq
from tests.compress.test_convolutions import LAYERS, layer
from tests.conftest import heavy_tailed
from tests.lower.running import difference, session

COVERED = Range(-0.7, 2.1)
"""A range whose zero point is not 128: padding by 0 is not integer 0 in TensorRT's dialect."""
IMAGES = heavy_tailed((2, 4, 9, 8), 5).numpy()
DIALECTS: dict[str, Any] = {
    "ort": ort_qdq.lower,
    "trt": lambda *a: trt_qdq.lower(*a, "fp32"),
}


def graph(modules: dict[str, nn.Conv2d]) -> ir.Model:
    """One convolution behind the other, a ReLU between."""
    nodes, tensors, value = [], [], "x"
    images = torch.zeros(IMAGES.shape)
    for name, m in modules.items():
        operands = [value, f"{name}.weight", *([f"{name}.bias"] if m.bias is not None else [])]
        tensors += [
            numpy_helper.from_array(p.detach().numpy(), f"{name}.{part}")
            for part, p in m.named_parameters()
        ]
        left, right, above, below = ConvGeometry.read(m).extra_padding_of(images)
        images = m(images).detach()
        up, across = m.padding
        options = {
            "pads": [up + above, across + left, up + below, across + right],
            "strides": list(m.stride),
            "dilations": list(m.dilation),
            "group": m.groups,
        }
        nodes.append(helper.make_node("Conv", operands, [f"{name}/y"], f"{name}/Conv", **options))
        nodes[-1].metadata_props.add(key=MODULE, value=name)
        nodes.append(helper.make_node("Relu", [f"{name}/y"], [f"{name}/relu"], f"{name}/Relu"))
        value = f"{name}/relu"
    nodes.pop()
    made = helper.make_graph(
        nodes,
        "filters",
        [helper.make_tensor_value_info("x", 1, ["batch", *IMAGES.shape[1:]])],
        [helper.make_tensor_value_info(nodes[-1].output[0], 1, [None] * 4)],
        tensors,
    )
    imports = [helper.make_opsetid("", 21)]
    return ir.from_proto(helper.make_model(made, opset_imports=imports, ir_version=10))


def state_of(modules: dict[str, nn.Conv2d], ranges: dict[str, Range]) -> CompressedState:
    """Rounded to nearest; the modules get the biases of their integers."""
    weights = {
        f"{n}.weight": rtn(m.weight.detach().flatten(1), Scheme(8)) for n, m in modules.items()
    }
    biases = {}
    for n, m in modules.items():
        if m.bias is not None:
            bias = round_bias(m.bias.detach(), ranges[n], weights[f"{n}.weight"].scale)
            m.bias = nn.Parameter(bias, requires_grad=False)
            biases[f"{n}.bias"] = bias
    sites = {input_name(n): r for n, r in ranges.items()}
    return CompressedState(weights, biases, sites, activations="tensor")


def lowered(modules: dict[str, nn.Conv2d], ranges: dict[str, Range], dialect: str) -> ir.Model:
    state = state_of(modules, ranges)
    model = graph(modules)
    parameters = {
        f"{n}.{p}": t.detach() for n, m in modules.items() for p, t in m.named_parameters()
    }
    paired = names.pair(model, parameters, list(modules), state.weights)
    DIALECTS[dialect](model, paired, state)
    return model


def answer(model: ir.Model, optimize: bool = False, optimized: Path | None = None) -> np.ndarray:
    encoded = ir.to_proto(model).SerializeToString()
    return np.asarray(session(encoded, optimize, optimized).run(None, {"x": IMAGES})[0])


def simulated(module: nn.Conv2d, covered: Range, x: Tensor) -> Tensor:
    q = rtn(module.weight.detach().flatten(1), Scheme(8))
    with torch.no_grad():
        result: Tensor = QuantConvolution(q, module, "tensor", covered)(x)
    return result


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", LAYERS)
def test_a_dialect_computes_what_the_state_computes(name: str, dialect: str) -> None:
    module = layer(name)
    model = lowered({"conv": module}, {"conv": COVERED}, dialect)
    expected = simulated(module, COVERED, torch.from_numpy(IMAGES)).numpy()
    assert difference(answer(model), expected) < 1e-6


@pytest.mark.parametrize("name", LAYERS)
def test_onnx_runtime_sums_integers_from_an_integer_bias(name: str, tmp_path: Path) -> None:
    first, second = layer(name), nn.Conv2d(8, 3, 1)
    x = torch.from_numpy(IMAGES)
    between = simulated(first, COVERED, x).relu()
    ranges = {"first": COVERED, "second": Range(0.0, float(between.max()))}
    model = lowered({"first": first, "second": second}, ranges, "ort")
    found = answer(model, True, tmp_path / "optimized.onnx")
    run = {n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node}
    assert "QLinearConv" in run
    expected = simulated(second, ranges["second"], simulated(first, COVERED, x).relu()).numpy()
    assert difference(found, expected) < 5e-3  # a few values between on the other side of a tie


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", ["grouped", "strided"])
def test_what_is_read_back_is_the_state(name: str, dialect: str, tmp_path: Path) -> None:
    """Weight [o, c, h, w] is the stated place of row o; the bias and the range are the state's."""
    module = layer(name)
    q = rtn(module.weight.detach().flatten(1), Scheme(8))
    model = lowered({"conv": module}, {"conv": COVERED}, dialect)
    codes = model.graph.initializers["conv.weight_codes"].const_value
    assert codes is not None
    stored = codes.numpy()
    assert stored.shape == tuple(module.weight.shape)
    height, width = stored.shape[2:]
    for o, c, h, w in np.ndindex(stored.shape):
        assert stored[o, c, h, w] == q.integers[o, (c * height + h) * width + w]
    path = tmp_path / "model.onnx"
    onnx_file.save(model, path)
    assert np.array_equal(cut.dequantize(path, "conv.weight"), q.dequantize())
    found = graph_constants.read_input_quantizations(path, ["conv"])["conv"]
    assert found.scale == pytest.approx(COVERED.scale, rel=1e-7)
    signed = dialect == "trt"
    assert (found.zero_point, bool(found.offset)) == (0 if signed else COVERED.zero_point, signed)
    if not signed:
        assert module.bias is not None
        bias = graph_constants.read_biases(path, ["conv"])["conv"]
        assert np.array_equal(bias, module.bias.detach().numpy())


def test_a_bias_that_is_not_of_integers_is_refused() -> None:
    module = layer("padded")
    state = state_of({"conv": module}, {"conv": COVERED})
    assert module.bias is not None
    module.bias.data += 0.3 * COVERED.scale * state.weights["conv.weight"].scale[:, 0]
    model = graph({"conv": module})
    parameters = {f"conv.{p}": t.detach() for p, t in module.named_parameters()}
    paired = names.pair(model, parameters, ["conv"], state.weights)
    with pytest.raises(OptimizeError, match=r"conv.bias is not a multiple of the input's step"):
        ort_qdq.lower(model, paired, state)


def test_a_range_of_no_residual_add_is_refused() -> None:
    module, ranges = layer("padded"), {"conv": COVERED, "elsewhere": COVERED}
    with pytest.raises(OptimizeError, match="elsewhere, which has no quantized weight"):
        lowered({"conv": module}, ranges, "trt")


@pytest.mark.parametrize(
    ("before", "integers", "quantizers"),
    [("Relu", False, 1), ("MaxPool", False, 2), ("MaxPool", True, 2)],
)
def test_an_add_reads_the_integers_of_a_convolution_but_behind_a_max_pool_of_floats(
    before: str, integers: bool, quantizers: int
) -> None:
    module = nn.Conv2d(4, 4, 1)
    state = state_of({"conv": module}, {"conv": COVERED})
    model = graph({"conv": module})
    x, product = model.graph.inputs[0], model.graph.node(0)
    options = {"kernel_shape": [1, 1]} if before == "MaxPool" else {}
    made = ir.node(before, [x], options, name="before")
    made.outputs[0].name = "v"
    model.graph.insert_before(product, made)
    product.replace_input_with(0, made.outputs[0])
    add = ir.node("Add", [product.outputs[0], made.outputs[0]], name="add")
    add.outputs[0].name = "sum"
    model.graph.append(add)
    model.graph.outputs.append(add.outputs[0])
    ranges = {"conv": COVERED, "shortcut": COVERED, **({"pooled": COVERED} if integers else {})}
    state = replace(state, ranges={input_name(n): r for n, r in ranges.items()})
    parameters = {f"conv.{p}": t.detach() for p, t in module.named_parameters()}
    paired = names.pair(model, parameters, ["conv"], state.weights)
    summands = {
        "shortcut": (names.OperatorInput("add", "v"),),
        "pooled": (names.OperatorInput("before", x.name),),
    }
    ort_qdq.lower(model, replace(paired, summands=summands), state)
    assert len([n for n in model.graph if n.op_type == "QuantizeLinear"]) == quantizers
    found = graph_constants.read_input_quantizations(
        OpenGraph(Path("model.onnx"), model), ["conv"], ["shortcut"]
    )
    assert found["shortcut"] == found["conv"]
