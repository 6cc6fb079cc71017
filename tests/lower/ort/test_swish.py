"""Swish behind integers is one operator of ONNX Runtime, of the same value."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import parser

from optimizer.lower.ort import swish
from tests.lower.running import session

SWISH = "s = Sigmoid(x) y = Mul(x, s)"
LEFT = {
    "its input is float": f"x = Relu(v) {SWISH}",
    "a gate of something else": "x = DequantizeLinear(c, step) s = Sigmoid(x) y = Mul(v, s)",
    "the sigmoid is read twice": f"x = DequantizeLinear(c, step) {SWISH} z = Neg(s)",
}


def graph(body: str) -> ir.Model:
    """v float, c integers; y and, where the body makes it, z are outputs."""
    outputs = "float[4, 256] y" + (", float[4, 256] z" if "z =" in body else "")
    text = (
        '<ir_version: 10, opset_import: ["" : 21]> g (float[4, 256] v, uint8[4, 256] c) '
        f"=> ({outputs}) <float step = {{0.05}}> {{ {body} }}"
    )
    return ir.from_proto(parser.parse_model(text))


def test_every_integer_gives_the_same() -> None:
    codes = np.arange(256, dtype=np.uint8)[None].repeat(4, 0)
    given = {"v": np.zeros((4, 256), np.float32), "c": codes}
    body = f"x = DequantizeLinear(c, step) {SWISH}"
    (expected,) = session(onnx_bytes(graph(body)), optimize=False).run(None, given)
    model = graph(body)
    assert len(swish.fuse(model)) == 1
    assert [n.op_type for n in model.graph] == ["DequantizeLinear", swish.OPERATOR]
    (found,) = session(onnx_bytes(model)).run(None, given)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("body", LEFT.values(), ids=LEFT.keys())
def test_all_else_is_left(body: str) -> None:
    model = graph(body)
    before = [n.op_type for n in model.graph]
    assert swish.fuse(model) == ()
    assert [n.op_type for n in model.graph] == before


def onnx_bytes(model: ir.Model) -> bytes:
    proto: onnx.ModelProto = ir.to_proto(model)
    return proto.SerializeToString()
