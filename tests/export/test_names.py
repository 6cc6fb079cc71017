from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor

from optimizer.export import names
from optimizer.foundation.errors import OptimizeError
from tests.export.graphs import graph


def tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.copy())


RNG = np.random.default_rng(0)
A, C = (RNG.normal(size=(3, 3)).astype(np.float32) for _ in range(2))  # square: shape tells nothing
TWO = "g (float[n, 3] x) => (float[n, 3] z) { y = MatMul(x, aw) z = MatMul(y, cw) }"


def two(a: np.ndarray = A.T, c: np.ndarray = C.T) -> ir.Model:
    """Modules a and c, one after the other, weights stored [K, N]."""
    model = graph(TWO, aw=np.ascontiguousarray(a), cw=np.ascontiguousarray(c))
    for old, new in (("aw", "a.weight"), ("cw", "c.weight")):
        model.graph.initializers[old].name = new
    for node, module in zip(model.graph, ("a", "c"), strict=True):
        node.name = f"{module}/MatMul"
        node.metadata_props["module"] = module
    return model


def paired(model: ir.Model, **values: np.ndarray) -> names.GraphNames:
    parameters = {f"{k}.weight": tensor(v) for k, v in (values or {"a": A, "c": C}).items()}
    return names.pair(model, parameters, [k.removesuffix(".weight") for k in parameters])


def test_each_module_gets_its_node_its_input_and_its_site() -> None:
    found = paired(two()).modules["c"]
    assert (found.initializer, found.node, found.layout) == ("c.weight", "c/MatMul", "KN")
    assert (found.input, found.site) == ("y", "c:input")


def test_a_weight_that_was_never_transposed_is_not_accepted_by_its_name() -> None:
    with pytest.raises(OptimizeError, match=r"a\.weight .* holds other values"):
        paired(two(a=A + 1))


def test_two_weights_under_each_others_names_are_not_accepted() -> None:
    with pytest.raises(OptimizeError, match="holds other values"):
        paired(two(a=C.T, c=A.T))


def test_one_changed_element_is_seen() -> None:
    changed = A.T.copy()
    changed[1, 2] = np.nextafter(changed[1, 2], 2, dtype=np.float32)
    with pytest.raises(OptimizeError, match=r"a\.weight"):
        paired(two(a=changed))


def test_a_renamed_initializer_is_found_by_its_value() -> None:
    model = two()
    model.graph.initializers["a.weight"].name = "val_49"
    assert paired(model).modules["a"].initializer == "val_49"


def test_equal_weights_kept_once_are_told_apart_by_where_they_were_traced() -> None:
    model = two(c=A.T)
    kept = model.graph.initializers["a.weight"]
    ir.convenience.replace_all_uses_with(model.graph.initializers["c.weight"], kept)
    del model.graph.initializers["c.weight"]
    found = paired(model, a=A, c=A)
    assert {m: found.modules[m].node for m in "ac"} == {"a": "a/MatMul", "c": "c/MatMul"}
    assert found.modules["c"].initializer == "a.weight"


def test_a_module_used_twice_lists_every_use() -> None:
    model = two(c=A.T)
    kept = model.graph.initializers["a.weight"]
    ir.convenience.replace_all_uses_with(model.graph.initializers["c.weight"], kept)
    del model.graph.initializers["c.weight"]
    found = paired(model, a=A).modules["a"]
    assert (found.node, found.also) == ("a/MatMul", (names.OperatorInput("c/MatMul", "y"),))


def test_a_weight_that_is_also_an_embedding_is_found_behind_its_transpose() -> None:
    model = graph(
        "g (float[n, 3] x, int64[m] i) => (float[n, 3] y, float[m, 3] e)"
        "{ t = Transpose<perm = [1, 0]>(w) y = MatMul(x, t) e = Gather(w, i) }",
        w=A,
    )
    model.graph.initializers["w"].name = "a.weight"
    for node in model.graph:
        node.name = f"a/{node.op_type}"
    assert paired(model, a=A).modules["a"].layout == "NK"


def test_an_embedding_is_paired_with_what_looks_its_rows_up() -> None:
    model = graph(
        "g (int64[m] i) => (float[m, 3] e, float[3, m] c)"
        "{ e = Gather(w, i) c = Gather<axis = 1>(w, i) }",
        w=A,
    )
    model.graph.initializers["w"].name = "val_7"
    for node, name in zip(model.graph, ("by row", "by column"), strict=True):
        node.name = name
    found = names.pair(model, {"a.weight": tensor(A)}, (), ["a.weight"], tables=["a"])
    assert found.lookups == {"a": names.Lookup("a.weight", "val_7", ("by row",))}
    assert names.from_dict(found.as_dict()) == found


def test_a_table_that_nothing_looks_up_cannot_be_in_codes() -> None:
    parameters = {"a.weight": tensor(A), "c.weight": tensor(C)}
    assert names.pair(two(), parameters, ["a"], tables=["c"]).lookups == {}
    with pytest.raises(OptimizeError, match=r"c\.weight cannot be found"):
        names.pair(two(), parameters, ["a"], ["c.weight"], tables=["c"])


def test_a_symmetric_matrix_is_paired_in_the_layout_its_operator_needs() -> None:
    symmetric = A + A.T
    assert paired(two(a=symmetric), a=symmetric, c=C).modules["a"].layout == "KN"


def test_a_half_precision_graph_pairs_with_float_parameters() -> None:
    half = two(a=A.T.astype(np.float16), c=C.T.astype(np.float16))
    assert set(paired(half).modules) == {"a", "c"}


def test_a_weight_no_operator_multiplies_by_is_an_error() -> None:
    parameters = {"a.weight": tensor(A), "c.weight": tensor(C), "lost.weight": tensor(A + C)}
    with pytest.raises(OptimizeError, match=r"lost\.weight cannot be found"):
        names.pair(two(), parameters, ["a", "c"], quantized=["lost.weight"])


def test_parameters_without_an_initializer_are_listed() -> None:
    parameters = {"a.weight": tensor(A), "c.weight": tensor(C), "pooler.bias": tensor(A[0])}
    assert names.pair(two(), parameters, ["a", "c"]).folded == ("pooler.bias",)


def test_names_survive_json() -> None:
    import json

    found = paired(two())
    assert names.from_dict(json.loads(json.dumps(found.as_dict()))) == found
