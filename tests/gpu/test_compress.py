"""Compression on a GPU: the same bytes twice, and the gain of the method."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from optimizer.compress import stage
from optimizer.compress.data import calibration
from optimizer.foundation import state
from tests.compress.checkpoints import contents
from tests.compress.conftest import llama as llama
from tests.compress.decoders import error, section

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]


def test_gptq_on_a_gpu_repeats_its_bytes_and_loses_less_than_rounding(
    llama: Path, tmp_path: Path
) -> None:
    def compressed(name: str, method: str, device: str) -> Path:
        out, quantize = tmp_path / name, section(llama, method=method)
        out.mkdir()
        batches = partial(calibration.make_batches, quantize, llama)
        stage.compress(quantize, llama, batches, out, torch.device(device, 0))
        return out

    one, again = (compressed(name, "gptq", "cuda") for name in ("1", "2"))
    assert contents(one) == contents(again)
    nearest = compressed("rtn", "rtn", "cpu")
    assert error(llama, state.read(one)) < error(llama, state.read(nearest))
