"""DeBERTa-v3 as it is published: keys and queries of relative positions by the modules of the
text's own (share_att_key), so that one weight multiplies two tensors, of which one has no batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx.numpy_helper import to_array as value

from optimizer.lower.onnx.cut import Edge
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.pieces import pieces
from optimizer.validate.ledger.pieces.quantizer import Quantizer, list_probes
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.ledger.trace import Trace
from tests.conftest import heavy_tailed, write_tokenizer
from tests.validate.runs import SCHEMES, Run, damaged, make, recipe


@pytest.fixture(scope="module")
def deberta(tmp_path_factory: pytest.TempPathFactory) -> Run:
    from transformers import DebertaV2Config, DebertaV2Model

    root = tmp_path_factory.mktemp("deberta")
    for name in ("deberta", "data"):
        (root / name).mkdir()
    config = DebertaV2Config(
        vocab_size=write_tokenizer(root / "deberta"),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
        share_att_key=True,
        norm_rel_ebd="layer_norm",
        position_biased_input=False,
        max_relative_positions=-1,
    )
    model = DebertaV2Model(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(heavy_tailed(tuple(parameter.shape), i, 0.08))
    model.save_pretrained(root / "deberta")
    static = SCHEMES["static"]
    return make(root, recipe(str(root / "deberta"), root / "data", static, "sentence-embedding"))


def test_every_hop_of_shared_relative_positions_is_judged_and_passes(deberta: Run) -> None:
    entries = ledger.run(deberta.materials())
    assert [(e.hop, e.problems) for e in entries if not e.ok] == []
    lower = next(e for e in entries if e.hop == "lower")
    looked_at = [p.module for p in lower.pieces if p.piece == "quantizer"]
    assert sum(m.endswith("query_proj") for m in looked_at) == 2


def test_another_step_of_what_has_no_batch_is_found(deberta: Run, tmp_path: Path) -> None:
    """Planted fault: the second use of a module quantizes by a step one percent too large."""

    def wider(run: Run) -> None:
        file = run.folder("model") / "model.onnx"
        model = onnx.load(file)
        (step,) = (
            t for t in model.graph.initializer if t.name.endswith("query_proj/input_1_scale")
        )
        step.CopyFrom(onnx.numpy_helper.from_array(np.float32(1.01) * value(step), step.name))
        onnx.save(model, file)

    entry = ledger.run_hop(ledger.hops.lower, damaged(deberta.materials(), tmp_path, wider))
    assert any("query_proj" in words for words in entry.problems)


def test_probes_of_what_has_no_batch_fill_its_own_shape() -> None:
    q, width = Quantizer(0.1, 128, 0, 255, UNIT["fp32"]), 4
    edge = Edge("a", "relative", "y", 3, 3, integers="codes", integers_rank=3)
    texts = [(np.ones((n, 5), np.int64), np.zeros((1, 3, width), np.float32)) for n in (1, 2)]
    traces = [Trace(mask, {}, inputs={("a", 0): x}) for mask, x in texts]
    linear = pieces.Linear(q, lambda: pytest.fail("no product is read"))
    given = list(pieces._inputs([(edge, ("a", 0))], traces, lambda _: linear))
    probed = [arrays["relative"] for arrays, of_a_text in given if not of_a_text]
    assert {x.shape for x in probed} == {(1, 3, width)}
    rows = {row.tobytes() for x in probed for row in x.reshape(-1, width)}
    assert rows == {row.tobytes() for row in list_probes(q, width)}
