"""Sizes that an engine for a GPU is padded to are proven on the CPU, at hop `engine`."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from optimizer.recipe.schema import OnnxRuntimeTarget
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.materials import Materials
from tests.decoders import write_tiny_decoder
from tests.validate.runs import make, recipe

PAD = 1
TASK = "text-classification"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """A decoder that classifies by the last token whose id is not that of padding, for CUDA."""
    root = tmp_path_factory.mktemp("padded")
    model = write_tiny_decoder(root / "model", "gpt2", task=TASK, pad_token_id=PAD, num_labels=3)
    (root / "data").mkdir()
    weights = {"weights": {"bits": 8, "granularity": "channel"}}
    section = recipe(str(model), root / "data", weights, TASK)
    target = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda", on_missing="defer")
    return make(root / "run", section.model_copy(update={"targets": (target,)})).materials()


def test_a_clean_run_holds_although_the_engine_is_not_run(clean: Materials) -> None:
    entry = ledger.run_hop(hops.engine, clean)
    assert entry.ok is None
    assert "the engine was not built here" in entry.why


def test_padding_that_the_model_takes_for_text_is_caught(clean: Materials) -> None:
    made = copy.copy(clean)
    tokenizer = replace(clean.contract.text, pad_id=PAD + 1)
    made.__dict__ |= {"contract": replace(clean.contract, tokenizer=tokenizer)}
    entry = ledger.run_hop(hops.engine, made)
    assert entry.ok is False
    assert "padded to the engine's sizes, logits" in entry.problems[0]
