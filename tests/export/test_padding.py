"""An encoder whose answers depend on what padding holds is refused, in whichever operator it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from optimizer.export.padding import check_padding
from optimizer.foundation.errors import CheckpointError
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.conftest import write_tokenizer
from tests.export.folders import exported, loaded

VALUES, WIDTH = 40, 4
LIMITS, USUAL = {"y": 1e-3}, {"y": 0.0}
MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
HEAD = f"""
<ir_version: 10, opset_import: ["" : 20]>
g (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
    => (float[batch, N, {WIDTH}] y)
"""
LEFT_OUT = {
    "each token alone": "y = Gather(table, input_ids)",
    "tokens before": "x = Gather(table, input_ids) y = CumSum(x, one)",
    "a masked sum": """
        x = Gather(table, input_ids) m0 = Cast<to = 1>(attention_mask) m = Unsqueeze(m0, last)
        z = Mul(x, m) y = ReduceSum<keepdims = 1>(z, one)
    """,
}
LEFT_OUT["a mask by an exp that is never 0"] = LEFT_OUT["a masked sum"].replace(
    "z = Mul(x, m)", "least = Max(m, tiny) z = Mul(x, least)"
)
LET_IN = {
    "tokens behind": "x = Gather(table, input_ids) y = CumSum<reverse = 1>(x, one)",
    "a sum of all": "x = Gather(table, input_ids) y = ReduceSum<keepdims = 1>(x, one)",
    "a mean that counts padding": """
        x = Gather(table, input_ids) m0 = Cast<to = 1>(attention_mask) m = Unsqueeze(m0, last)
        z = Mul(x, m) y = ReduceMean<keepdims = 1>(z, one)
    """,
    "a mask too weak": """
        x = Gather(table, input_ids) m0 = Cast<to = 1>(attention_mask) m1 = Unsqueeze(m0, last)
        m = Max(m1, little) z = Mul(x, m) y = ReduceSum<keepdims = 1>(z, one)
    """,
}


def runner(nodes: str, folder: Path) -> OrtRunner:
    model = onnx.parser.parse_model(HEAD + "{" + nodes + "}")
    table = np.random.default_rng(0).standard_normal((VALUES, WIDTH)).astype(np.float32)
    table[batch()["input_ids"][MASK == 1], 0] = 0  # where the least that is let in shows
    constants = {"table": table, "one": np.array([1]), "last": np.array([2])}
    constants["little"], constants["tiny"] = np.float32([1e-5, 2.0**-127])
    if "CumSum" in nodes:
        constants["one"] = np.array(1)
    for name, value in constants.items():
        if name in nodes:
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    onnx.save(model, folder / "model.onnx")
    return OrtRunner(folder / "model.onnx", threads=1)


def batch() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(1).integers(1, VALUES, MASK.shape)
    return {"input_ids": np.where(MASK, ids, 0), "attention_mask": MASK}


@pytest.mark.parametrize("nodes", LEFT_OUT.values(), ids=list(LEFT_OUT))
def test_a_graph_that_leaves_padding_out_passes(nodes: str, tmp_path: Path) -> None:
    with runner(nodes, tmp_path) as opened:
        check_padding(opened, batch(), VALUES, LIMITS, USUAL)


@pytest.mark.parametrize("nodes", LET_IN.values(), ids=list(LET_IN))
def test_a_graph_that_lets_padding_in_is_refused(nodes: str, tmp_path: Path) -> None:
    with (
        runner(nodes, tmp_path) as opened,
        pytest.raises(CheckpointError, match=r"^model\.source: y of the same tokens changes by"),
    ):
        check_padding(opened, batch(), VALUES, LIMITS, USUAL)


def test_a_convolution_over_padding_is_refused_before_hours_of_building(tmp_path: Path) -> None:
    from transformers import ConvBertConfig, ConvBertModel

    torch.manual_seed(0)
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 32, "embedding_size": 32, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 64}
    config = ConvBertConfig(vocab_size=write_tokenizer(tmp_path / "model"), **sizes)
    ConvBertModel(config).save_pretrained(tmp_path / "model")
    source = loaded(tmp_path / "model", tmp_path / "load")
    with pytest.raises(CheckpointError, match="when padding holds other tokens"):
        exported(source, tmp_path / "export")
