"""Learned rounding inside the walk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.compress.apply.weights import rounding as rounding_module
from optimizer.compress.simulate import simulate_state
from optimizer.data import datasets
from optimizer.foundation import state as states
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.compress.decoders import TASK, compress, section


def first_block_error(source: Path, state: states.CompressedState) -> float:
    """Of what the first block answers on the calibration windows: what learning makes less."""
    model, wanted = load_torch_model(open_checkpoint(source), TASK), section(source).calibrate
    assert wanted is not None
    made = read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", made)
    texts = datasets.read_samples(wanted.data, None, wanted.seed)
    cut = datasets.cut_windows(texts, tokenizer, made, wanted.sequence_length)[: wanted.samples]
    ids = torch.tensor(np.stack(cut))

    def answer(of: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return of(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1]

    exact = answer(model)
    return float((answer(simulate_state(model, state)) - exact).norm() / exact.norm())


def test_learned_rounding_improves_on_where_it_starts(llama: Path, tmp_path: Path) -> None:
    start = compress(llama, tmp_path / "a", methods=["gptq"])
    learned = compress(
        llama, tmp_path / "b", methods=["gptq", "autoround"], autoround={"steps": 40}
    )
    changed = [
        n
        for n in start.weights
        if not torch.equal(start.weights[n].integers, learned.weights[n].integers)
    ]
    assert changed
    assert first_block_error(llama, learned) < first_block_error(llama, start)
    rows = json.loads((tmp_path / "b" / "modules.json").read_text())
    assert any("learned" in row["note"] for row in rows)


@pytest.mark.parametrize("aims", [True, False])
def test_beside_learned_rounding_gptq_aims_where_the_recipe_says(
    llama: Path, tmp_path: Path, aims: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets: list[Any] = []
    original = rounding_module.measure_hessian

    def listening(*arguments: Any) -> Any:
        targets.append(arguments[4])
        return original(*arguments)

    monkeypatch.setattr(rounding_module, "measure_hessian", listening)
    options = {"gptq": {"float_target": aims}, "autoround": {"steps": 1}}
    compress(llama, tmp_path / "out", methods=["gptq", "autoround"], **options)
    assert {t is not None for t in targets} == {aims}
