"""Keys are laid out in two steps, and no bit of what is computed differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optimizer.harness.runtimes.openvino.run import OpenVinoRunner
from optimizer.lower.openvino import transpose
from optimizer.recipe.schema import OpenVinoTarget
from tests.export.folders import Exported
from tests.export.graphs import answer, graph, operators
from tests.lower.running import lowered
from tests.lower.states import PER_CHANNEL, state_of

TARGET = OpenVinoTarget(runtime="openvino")


def product(perm: str, use: str = "y = MatMul(q, t)") -> str:
    return (
        "g (float[2, 3, 4, 5] q, float[2, 4, 3, 5] k) => (float[n, h, a, b] y)"
        f"{{ t = Transpose<perm = [{perm}]>(k) {use} }}"
    )


def test_heads_first_and_then_the_last_two_axes() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 3, 4, 5)), rng.normal(size=(2, 4, 3, 5))
    inputs = {"q": q.astype(np.float32), "k": k.astype(np.float32)}
    model, same = graph(product("0, 2, 3, 1")), graph(product("0, 2, 3, 1"))
    for made in (model, same):
        made.graph[0].name = "attention/Transpose"
    assert len(transpose.split(model)) == 1
    assert operators(model) == ["Transpose", "Transpose", "MatMul"]
    orders = [tuple(n.attributes["perm"].as_ints()) for n in list(model.graph)[:2]]
    assert orders == [(0, 2, 1, 3), (0, 1, 3, 2)]
    assert np.array_equal(answer(model, **inputs), answer(same, **inputs))


@pytest.mark.parametrize(
    ("perm", "use"),
    [
        ("0, 2, 1, 3", "y = MatMul(q, t)"),
        ("0, 1, 3, 2", "y = MatMul(q, t)"),
        ("0, 3, 2, 1", "y = MatMul(q, t)"),
        ("0, 2, 3, 1", "y = MatMul(t, q)"),
        ("0, 2, 3, 1", "y = Softmax(t)"),
    ],
)
def test_others_stay_as_they_are(perm: str, use: str) -> None:
    text = product(perm, use)
    if "q" not in use.partition("=")[2]:
        text = text.replace("float[2, 3, 4, 5] q, ", "")
    model = graph(text)
    before = operators(model)
    assert transpose.split(model) == ()
    assert operators(model) == before


def test_openvino_copies_whole_rows_of_keys(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL, "tensor"), TARGET, tmp_path)
    with OpenVinoRunner(folder / "model.onnx", threads=1) as runner:
        copied = [k.layers for k in runner.kernels() if k.kind == "Transpose"]
    steps = [layer.rpartition("/")[2] for layers in copied for layer in layers]
    assert "rows" in steps
    assert "columns" not in steps
