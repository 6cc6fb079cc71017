from __future__ import annotations

import numpy as np

from optimizer.export.passes.transpose_weights import is_transposed, transpose_weights
from tests.export.graphs import answer, graph, operators

W = np.arange(12, dtype=np.float32).reshape(4, 3)  # (out, in), as torch has it
B = np.array([1, 2, 3, 4], np.float32)
X = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)


def test_a_transposed_weight_is_stored_transposed_under_its_name() -> None:  # case 1
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) }",
        w=W,
    )
    assert not is_transposed(model)
    transpose_weights(model)
    assert is_transposed(model)
    assert operators(model) == ["MatMul"]
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), W.T)
    assert np.allclose(answer(model, x=X), X @ W.T)


def test_a_gemm_becomes_a_matmul_and_an_add(  # case 2
) -> None:
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { y = Gemm<transB = 1>(x, w, b) }", w=W, b=B
    )
    transpose_weights(model)
    assert operators(model) == ["MatMul", "Add"]
    assert np.allclose(answer(model, x=X), X @ W.T + B, atol=1e-5)


def test_a_scaled_gemm_is_left_alone() -> None:
    model = graph(
        "g (float[n, 3] x) => (float[n, 4] y) { y = Gemm<transB = 1, alpha = 0.5>(x, w, b) }",
        w=W,
        b=B,
    )
    transpose_weights(model)
    assert operators(model) == ["Gemm"]


def test_a_weight_with_another_user_keeps_its_transpose() -> None:  # case 3
    model = graph(
        "g (float[n, 3] x, int64[m] i) => (float[n, 4] y, float[m, 3] e)"
        "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) e = Gather(w, i) }",
        w=W,
    )
    transpose_weights(model)
    assert "Transpose" in operators(model)
    assert np.array_equal(model.graph.initializers["w"].const_value.numpy(), W)
