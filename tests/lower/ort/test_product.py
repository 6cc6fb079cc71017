"""Products of integers with their bias in one operator compute what Q/DQ does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from optimizer.harness.runtimes.ort import exact_integers
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.ort import product
from tests.export.folders import Exported
from tests.export.graphs import graph
from tests.lower.running import ORT, PLAIN, answer, lowered, tokens
from tests.lower.states import PER_CHANNEL, SCHEMES, state_of


def operators(folder: Path) -> list[str]:
    return [n.op_type for n in onnx.load(folder / "model.onnx").graph.node]


@pytest.mark.parametrize("scheme", ["int8 channel", "int8 tensor"])
def test_no_bit_differs_from_quantize_and_dequantize(
    tiny: Exported, tmp_path: Path, scheme: str
) -> None:
    state = state_of(tiny, SCHEMES[scheme], "tensor", factored="dense")
    (tmp_path / "plain").mkdir()
    plain = lowered(tiny, state, PLAIN, tmp_path / "plain")
    folder = lowered(tiny, state, ORT, tmp_path)
    count = len(tiny.names.modules)
    assert product.OPERATOR not in operators(plain)
    assert (operators(folder).count(product.OPERATOR), operators(folder).count("MatMul")) == (
        count,
        operators(plain).count("MatMul") - count,
    )
    assert np.array_equal(answer(folder, tokens()), answer(plain, tokens()))


HELD = {
    "integers": np.arange(12, dtype=np.int8).reshape(4, 3),
    "scale": np.ones(3, np.float32),
    "grouped": np.ones((2, 3), np.float32),
    "zeros": np.ones(3, np.int8),
    "step": np.array(0.5, np.float32),
    "unsigned": np.array(128, np.uint8),
    "signed": np.array(0, np.int8),
    "bias": np.ones(3, np.float32),
    "column": np.ones((3, 1), np.float32),
}
LEFT = {
    "weights in groups": "{ w = DequantizeLinear<axis = 0, block_size = 2>(integers, grouped)",
    "weights with zero points": "{ w = DequantizeLinear<axis = 1>(integers, scale, zeros)",
    "no bias": "{ w = DequantizeLinear<axis = 1>(integers, scale)",
    "a bias for each row": "{ w = DequantizeLinear<axis = 1>(integers, scale)",
    "used elsewhere": "{ w = DequantizeLinear<axis = 1>(integers, scale)",
    "its input is signed": "{ w = DequantizeLinear<axis = 1>(integers, scale)",
}


@pytest.mark.parametrize("case", [*LEFT, "none of these"])
def test_what_the_operator_does_not_take_is_left(case: str) -> None:
    weight = LEFT.get(case, LEFT["no bias"])
    after = {
        "no bias": "y = Identity(p)",
        "a bias for each row": "y = Add(p, column)",
        "used elsewhere": "s = Add(p, bias) y = Mul(s, p)",
    }.get(case, "y = Add(p, bias)")
    zero = "signed" if case == "its input is signed" else "unsigned"
    text = (
        "g (float[1, 3, 4] x) => (float[1, 3, 3] y)"
        f"{weight} i = QuantizeLinear(x, step, {zero}) d = DequantizeLinear(i, step, {zero})"
        f" p = MatMul(d, w) {after} }}"
    )
    words = set(re.findall(r"\w+", text))
    model = graph(text, **{name: array for name, array in HELD.items() if name in words})
    for node in model.graph:
        node.name = f"m/{node.op_type}"
    done = product.fuse(model)
    kinds = [n.op_type for n in model.graph]
    assert (len(done), product.OPERATOR in kinds) == ((0, False) if case in LEFT else (1, True))
    ir.to_proto(model)


def test_as_written_it_is_exact_where_only_optimized_graphs_are(
    tiny: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On processors with AVX2 and no VNNI: the ledger runs operators one by one, and MatMul of
    floats is no longer what the file has."""
    monkeypatch.setattr(exact_integers, "list_settings", lambda _: (exact_integers.EXACT,))
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), ORT, tmp_path)
    with OrtRunner(folder / "model.onnx", threads=1, fuse=False) as runner:
        options = runner._session.get_session_options()
        assert options.graph_optimization_level.name == "ORT_ENABLE_EXTENDED"
        given = runner.infer(tokens())["last_hidden_state"]
    real = given[tokens()["attention_mask"].astype(bool)]
    np.testing.assert_allclose(real, answer(folder, tokens()), atol=1e-5)
