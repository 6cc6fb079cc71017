"""A decoder that counts its positions from attention_mask, inside the graph."""

from __future__ import annotations

import pytest

from optimizer.validate.ledger import ledger
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import SCHEMES, decoder_recipe, make_decoder
from tests.validate.runs import Run


@pytest.fixture(scope="module")
def opt_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("opt_run")
    (root / "data").mkdir()
    model = write_tiny_decoder(root / "opt", "opt", layers=1)
    return make_decoder(root, decoder_recipe(str(model), root / "data", SCHEMES["fused"], True))


def test_its_texts_that_come_and_go_have_what_each_has_alone(opt_run: Run) -> None:
    entry = ledger.run_hop(ledger.cache_laws.cache, opt_run.materials())
    assert entry.problems == ()


def test_its_past_and_present_are_one_buffer(opt_run: Run) -> None:
    import onnx

    graph = onnx.load(opt_run.folder("model") / "model.onnx", load_external_data=False)
    assert {p.key: p.value for p in graph.metadata_props}["kv_cache"] == "shared"
