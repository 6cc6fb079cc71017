from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from optimizer.export.passes.shapes import simplify_shapes


def model(op: str, given: list[int | str], wanted: list[int | str]) -> ir.Model:
    """x -> op(x, a shape that is an input) -> y"""
    x = ir.val("x", ir.DataType.FLOAT, given)
    shape = ir.val("s", ir.DataType.INT64, [len(wanted)])
    node = ir.node(op, [x, shape])
    node.outputs[0].name, node.outputs[0].shape = "y", ir.Shape(wanted)
    end = ir.node("Relu", node.outputs)
    graph = ir.Graph([x, shape], end.outputs, nodes=[node, end], opset_imports={"": 21})
    return ir.Model(graph, ir_version=10)


def target(made: ir.Model) -> list[int] | None:
    shape = next(iter(made.graph)).inputs[1]
    return None if shape is None or shape.const_value is None else list(shape.const_value.numpy())


@pytest.mark.parametrize(
    ("given", "wanted", "constant"),
    [
        (["b", "s", 64], ["b", "s", 4, 16], [0, 0, 4, 16]),
        (["b", 2, 3, "p + s", 16], ["b", 6, "p + s", 16], [0, 6, -1, 16]),
        (["b", "s", 64], ["s", "b", 64], None),  # two dimensions that move
    ],
)
def test_a_reshape_takes_numbers_where_shapes_prove_them(  # case 1
    given: list[int | str], wanted: list[int | str], constant: list[int] | None
) -> None:
    made = model("Reshape", given, wanted)
    simplify_shapes(made)
    assert target(made) == constant


def test_an_expansion_keeps_what_is_there(  # case 2
) -> None:
    made = model("Expand", ["b", 2, 1, "t", 16], ["b", 2, 3, "t", 16])
    simplify_shapes(made)
    assert target(made) == [1, 1, 3, 1, 1]


def test_an_expansion_to_its_own_shape_goes() -> None:  # case 3
    made = model("Expand", ["b", 1, "t"], ["b", 1, "t"])
    simplify_shapes(made)
    assert next(n for n in made.graph if n.op_type == "Relu").inputs[0].name == "x"  # type: ignore[union-attr]


def test_an_unknown_shape_is_left_alone() -> None:
    made = model("Expand", ["b", 1], ["b", "n"])
    simplify_shapes(made)
    assert target(made) is None
    assert np.all([n.op_type != "Identity" for n in made.graph])
