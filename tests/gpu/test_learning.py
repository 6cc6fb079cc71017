"""Training on one GPU, on all GPUs and on the CPU gives the same values."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from optimizer.reduce.learn.processes import count_of
from optimizer.validate.stage import use_one_torch_thread
from tests.reduce.learn.test_processes import SECTION, Prepared, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


@contextmanager
def tf32() -> Iterator[None]:
    """Inside, a GPU multiplies float32 in TF32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def test_a_model_learns_on_gpus_what_it_learns_on_the_cpu(tmp_path: Path) -> None:
    """As far as correct runs lie apart: of one and several threads, with and without TF32."""
    prepared = Prepared(tmp_path)
    cpu = prepared.learned("cpu", device="cpu", processes=1)
    with use_one_torch_thread():
        other_sums = prepared.learned("one-thread", device="cpu", processes=1)
    gpu = prepared.learned("gpu", device="cuda", processes=1)
    with tf32():
        coarse = prepared.learned("tf32", device="cuda", processes=1)
    gpus = prepared.learned("gpus", device="cuda", processes="auto")
    document = json.loads((gpus / "recovered.json").read_text())
    assert (document["device"], document["processes"]) == (
        "cuda",
        count_of(SECTION.model_copy(update={"device": "cuda"})),
    )

    def apart(one: Path, other: Path) -> float:
        a, b = weights(one), weights(other)
        return max(float((a[n] - b[n]).abs().max()) for n in a)

    limit = max(apart(cpu, other_sums), apart(gpu, coarse))
    assert limit < apart(cpu, prepared.smaller)  # else nothing was learned that can be compared
    assert apart(cpu, gpu) <= limit
    assert apart(cpu, gpus) <= limit
