from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from optimizer.export.passes import clean

W = np.arange(12, dtype=np.float32).reshape(4, 3)  # (out, in), as torch has it
B = np.array([1, 2, 3, 4], np.float32)
X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)


def graph(text: str, **held: np.ndarray) -> ir.Model:
    """A model from ONNX's text format, with initializers."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in held.items():
        tensor = ir.tensor(array, name=name)
        value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
        found = next(v for n in model.graph for v in n.inputs if v is not None and v.name == name)
        ir.convenience.replace_all_uses_with(found, value)
        model.graph.register_initializer(value)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def answer(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return np.asarray(ReferenceEvaluator(proto).run(None, inputs)[0])


def test_a_transposed_weight_is_stored_transposed_under_its_name() -> None:  # case 3.1
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }",
        w=W,
    )
    clean.lay_out_weights(model)
    assert operators(model) == ["MatMul"]
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), W.T)
    assert np.allclose(answer(model, x=X), X @ W.T)


def test_a_gemm_becomes_a_matmul_and_an_add(  # case 3.2
) -> None:
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { y = Gemm<transB = 1>(x, w, b) }", w=W, b=B
    )
    clean.lay_out_weights(model)
    assert operators(model) == ["MatMul", "Add"]
    assert np.allclose(answer(model, x=X), X @ W.T + B, atol=1e-5)


def test_a_scaled_gemm_is_left_alone() -> None:
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { y = Gemm<transB = 1, alpha = 0.5>(x, w, b) }",
        w=W,
        b=B,
    )
    clean.lay_out_weights(model)
    assert operators(model) == ["Gemm"]


def test_a_weight_with_another_user_keeps_its_transpose() -> None:  # case 3.3
    model = graph(
        "g (float[n, 3] x, int64[m] i) => (float[n, 4] y, float[m, 3] e)"
        "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) e = Gather(w, i) }",
        w=W,
    )
    clean.lay_out_weights(model)
    assert "Transpose" in operators(model)
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), W)


MASK = """
g (int64[b, s] mask) => (bool[b, 1, 1, s] y) {
  bit = Cast<to = 9>(mask)
  shape = Shape(mask)
  zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()
  axis = Constant<value = int64[1] {0}>()  last = Constant<value = int64[1] {-1}>()
  b = Gather(shape, zero)  s = Gather(shape, one)
  rows = Range(START, b, one)  cols = Range(zero, s, one)
  r1 = Constant<value = int64[3] {1, 2, 3}>()  c1 = Constant<value = int64[3] {0, 1, 2}>()
  r = Unsqueeze(rows, r1)  c = Unsqueeze(cols, c1)
  both = Max(r, c)  full = Shape(both)
  re = Expand(r, full)  ce = Expand(c, full)
  ru = Unsqueeze(re, last)  cu = Unsqueeze(ce, last)
  index = Concat<axis = -1>(ru, cu)
  y = GatherND(bit, index)
}"""


def constants_as_initializers(model: ir.Model) -> ir.Model:
    from onnx_ir.passes.common import LiftConstantsToInitializersPass

    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def test_a_gather_over_all_positions_becomes_unsqueeze() -> None:  # case 7.1
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    model = constants_as_initializers(graph(MASK.replace("START", "zero")))
    wanted = answer(model, mask=mask)
    clean.simplify_mask(model)
    clean.remove_dead(model)
    assert operators(model) == ["Cast", "Unsqueeze"]
    assert np.array_equal(answer(model, mask=mask), wanted)


def test_a_gather_that_skips_a_row_stays() -> None:
    model = constants_as_initializers(graph(MASK.replace("START", "one")))
    clean.simplify_mask(model)
    assert "GatherND" in operators(model)


@pytest.mark.parametrize(("first", "kept"), [("yes", False), ("no", True)])
def test_and_with_a_constant_goes_only_when_it_is_true(first: str, kept: bool) -> None:  # case 7.2
    model = constants_as_initializers(
        graph(
            "g (bool[n] m) => (bool[n] y) { yes = Constant<value = bool {1}>() "
            f"no = Constant<value = bool {{0}}>() a = And({first}, m) y = Not(a) }}"
        )
    )
    clean.simplify_mask(model)
    clean.remove_dead(model)
    assert ("And" in operators(model)) is kept


def test_nodes_and_values_are_named_by_module_and_operator() -> None:  # pass 8
    model = graph(
        "g (float[n, 3] x) => (float[n, 3] y) { a = Relu(x) b = Relu(a) y = Add(b, c) }", c=B[:3]
    )
    for node in model.graph:
        node.metadata_props[clean.SCOPES] = "['', 'model', 'model.layer.0', 'relu']"
    clean.name_everything(model, set())
    assert [n.name for n in model.graph] == ["layer.0/Relu", "layer.0/Relu_1", "layer.0/Add"]
    assert [n.outputs[0].name for n in model.graph] == ["layer.0/Relu:0", "layer.0/Relu_1:0", "y"]
    assert list(model.graph.initializers) == ["constant_0"]
    assert clean.module_of(next(iter(model.graph))) == "layer.0"
