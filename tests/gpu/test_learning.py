"""Training on one GPU, on all GPUs and on the CPU gives the same values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from optimizer.reduce.learn.processes import count_of
from tests.reduce.learn.test_processes import SECTION, Prepared, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_a_model_learns_on_gpus_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    prepared = Prepared(tmp_path)
    cpu = prepared.learned("cpu", device="cpu", processes=1)
    gpus = prepared.learned("gpus", device="cuda", processes="auto")
    document = json.loads((gpus / "recovered.json").read_text())
    assert (document["device"], document["processes"]) == (
        "cuda",
        count_of(SECTION.model_copy(update={"device": "cuda"})),
    )
    before, alone, there = map(weights, (prepared.smaller, cpu, gpus))
    moved = max(float((alone[n] - before[n]).abs().max()) for n in before)
    apart = max(float((alone[n] - there[n]).abs().max()) for n in before)
    assert apart < moved / 100
