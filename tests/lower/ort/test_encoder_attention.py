"""Attentions that hide nothing become one operator with the same values; others are left alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from optimizer.lower.ort import encoder_attention

POSITIONS, HEADS, WIDTH = 6, 2, 4
SPLIT = (-1, POSITIONS, HEADS, WIDTH)
RNG = np.random.default_rng(0)
OPERANDS = {n: RNG.standard_normal((3, POSITIONS, HEADS * WIDTH)).astype(np.float32) for n in "qkv"}
SEEN = np.ones((1, 1, POSITIONS, 1), bool)
SQUARE = (1, HEADS, POSITIONS, POSITIONS)


def graph(
    condition: NDArray[np.bool_] | None = SEEN,
    split: Sequence[int] = SPLIT,
    keys: Sequence[int] = (0, 2, 3, 1),
    read: bool = False,
) -> ir.Model:
    """softmax(q k' scale + mask) v. condition: where the mask is 0; None for no mask. read: whether
    the weights are an output too."""
    constants = {
        "split": np.array(split, np.int64),
        "merge": np.array([-1, POSITIONS, HEADS * WIDTH], np.int64),
        "scale": np.float32(WIDTH**-0.5),
        "none": np.float32(0),
        "hidden": np.float32(-1e9),
        "square": np.array([1, 1, POSITIONS, POSITIONS], np.int64),
        "condition": SEEN if condition is None else condition,
    }
    nodes = [helper.make_node("Identity", [n], [f"{n}0"]) for n in "qkv"]
    for name in "qkv":
        nodes.append(helper.make_node("Reshape", [f"{name}0", "split"], [f"{name}1"]))
        perm = keys if name == "k" else (0, 2, 1, 3)
        nodes.append(helper.make_node("Transpose", [f"{name}1"], [f"{name}2"], perm=perm))
    nodes += [
        helper.make_node("Expand", ["condition", "square"], ["seen"]),
        helper.make_node("Where", ["seen", "none", "hidden"], ["mask"]),
        helper.make_node("MatMul", ["q2", "k2"], ["products"]),
        helper.make_node("Mul", ["products", "scale"], ["scores"]),
        helper.make_node("Add", ["scores", "mask"], ["masked"]),
        helper.make_node("Softmax", ["scores" if condition is None else "masked"], ["weights"]),
        helper.make_node("MatMul", ["weights", "v2"], ["mixed"]),
        helper.make_node("Transpose", ["mixed"], ["back"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["back", "merge"], ["y"]),
    ]
    made = helper.make_graph(
        nodes,
        "attention",
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", *a.shape[1:]])
            for n, a in OPERANDS.items()
        ],
        [
            helper.make_tensor_value_info(n, TensorProto.FLOAT, None)
            for n in ("y", *(["weights"] if read else []))
        ],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()],
    )
    opset = [helper.make_opsetid("", 21)]
    return ir.from_proto(helper.make_model(made, opset_imports=opset, ir_version=10))


def answer(model: ir.Model) -> NDArray[np.float32]:
    session = ort.InferenceSession(
        ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    result: NDArray[np.float32] = session.run(["y"], OPERANDS)[0]
    return result


@pytest.mark.parametrize("condition", [SEEN, None])
def test_an_attention_that_hides_nothing_becomes_one_operator_with_the_same_values(
    condition: NDArray[np.bool_] | None,
) -> None:
    model = graph(condition)
    before = answer(model)
    assert len(encoder_attention.fuse(model)) == 1
    kinds = [n.op_type for n in model.graph]
    assert sorted(kinds) == ["Identity"] * 3 + ["MultiHeadAttention"]
    np.testing.assert_allclose(answer(model), before, rtol=1e-5, atol=1e-6)


def test_a_mask_and_a_position_bias_are_added_inside_the_operator() -> None:
    hidden = np.array([True] * (POSITIONS - 1) + [False]).reshape(1, 1, 1, -1)
    model = graph(hidden)
    bias = ir.val("bias", const_value=ir.tensor(RNG.standard_normal(SQUARE).astype(np.float32)))
    model.graph.register_initializer(bias)
    added = next(n for n in model.graph if n.op_type == "Add")
    scores = added.inputs[0]
    assert scores is not None
    more = ir.node("Add", [bias, scores])
    model.graph.insert_before(added, more)
    added.replace_input_with(0, more.outputs[0])
    before = answer(model)
    assert len(encoder_attention.fuse(model, biased=True)) == 1
    assert "Softmax" not in [n.op_type for n in model.graph]
    np.testing.assert_allclose(answer(model), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "other",
    [
        graph(np.array([True] * (POSITIONS - 1) + [False]).reshape(1, 1, 1, -1)),
        graph(split=(-1, POSITIONS // 2, HEADS, WIDTH)),
        graph(split=(-1, POSITIONS, WIDTH, HEADS), condition=None, keys=(0, 2, 1, 3)),
        graph(read=True),
    ],
    ids=["a mask that hides", "positions grouped anew", "keys not turned", "weights read"],
)
def test_what_is_of_another_form_is_left_as_it_is(other: ir.Model) -> None:
    before = [n.op_type for n in other.graph]
    assert encoder_attention.fuse(other) == ()
    assert [n.op_type for n in other.graph] == before
