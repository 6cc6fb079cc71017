"""Sizes that a GPU's runs are padded to are proven on the CPU: of a batch at hop `engine`, of a
decoder's step at hop `cache`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.ort.fixed_step import MASK, FixedStep
from optimizer.recipe.schema import OnnxRuntimeTarget
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.laws.decoder import cache_laws
from optimizer.validate.materials import Materials
from tests.decoders import write_tiny_decoder
from tests.validate.decoder_runs import INT8, decoder_recipe, make_decoder
from tests.validate.runs import make, recipe

PAD = 1
TASK = "text-classification"
CUDA = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda", on_missing="defer")


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """A decoder that classifies by the last token whose id is not that of padding, for CUDA."""
    root = tmp_path_factory.mktemp("padded")
    fields = {"pad_token_id": PAD, "num_labels": 3}
    model = write_tiny_decoder(root / "model", "gpt2", layers=1, task=TASK, **fields)
    (root / "data").mkdir()
    weights = {"weights": {"bits": 8, "granularity": "channel"}}
    section = recipe(str(model), root / "data", weights, TASK)
    return make(root / "run", section.model_copy(update={"targets": (CUDA,)})).materials()


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


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    """A decoder with 8-bit weights in fp16, for CUDA."""
    root = tmp_path_factory.mktemp("decoder")
    model = write_tiny_decoder(root / "model", "llama")
    (root / "data").mkdir()
    section = decoder_recipe(str(model), root / "data", {"weights": INT8})
    run = make_decoder(root / "run", section.model_copy(update={"targets": (CUDA,)}))
    return run.materials()


def test_a_decoder_in_half_precision_is_proven_with_steps_of_fixed_size(
    decoder: Materials, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, run = set(), FixedStep.run

    def recorded(step: FixedStep, arrays: Mapping[str, Array]) -> Array:
        sizes.add(step.capacity)
        return run(step, arrays)

    monkeypatch.setattr(FixedStep, "run", recorded)
    entries = [ledger.run_hop(hop, decoder) for hop in (hops.lower, cache_laws.cache)]
    assert [(e.ok, e.problems) for e in entries] == [(True, ())] * 2
    assert sizes


def test_a_step_whose_mask_covers_columns_without_tokens_is_caught(
    decoder: Materials, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FixedStep.run

    def wrong(step: FixedStep, arrays: Mapping[str, Array]) -> Array:
        longer = np.pad(arrays[MASK], ((0, 0), (0, 1)), constant_values=1)
        return run(step, {**arrays, MASK: longer[:, : step.capacity]})

    monkeypatch.setattr(FixedStep, "run", wrong)
    entry = ledger.run_hop(cache_laws.cache, decoder)
    assert entry.ok is False
    assert any(p.startswith("padded rows continued and alone") for p in entry.problems)
