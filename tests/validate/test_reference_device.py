"""The reference's answers on a stand-in for a GPU (tests/gpu/stand_in.py) are the CPU's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizer.foundation.errors import MachineError
from optimizer.recipe.schema import (
    CompressedTensorsTarget,
    DataSpec,
    Quantize,
    Validate,
    Validation,
)
from optimizer.validate.decoder import TorchDecoder, generate_greedily
from optimizer.validate.quality.answers import TorchRunner
from optimizer.validate.run_artifacts import RunArtifacts
from tests.compress.conftest import llama as llama
from tests.compress.conftest import loaded as loaded
from tests.gpu.stand_in import stand_in


def artifacts(source: Path, device: str = "cpu") -> RunArtifacts:
    data = DataSpec(source="json", files=("rows.jsonl",))
    section = Validation(
        validate=Validate(data=data, metric="cosine", max_drop=0.1, reference_device=device),
        quantize=Quantize(),
        calibrate=None,
        target=CompressedTensorsTarget(runtime="compressed-tensors"),
    )
    return RunArtifacts(section, source, *[source] * 4)


def on(device: torch.device, source: Path) -> RunArtifacts:
    m = artifacts(source)
    m.__dict__["reference_device"] = device
    return m


def test_an_encoder_answers_on_the_device(loaded: Path) -> None:
    texts = {"input_ids": np.array([[5, 6, 7]]), "attention_mask": np.ones((1, 3), np.int64)}
    here = TorchRunner(artifacts(loaded)).infer(texts)
    with stand_in() as gpu:
        there = TorchRunner(on(gpu, loaded)).infer(texts)
    assert all(np.array_equal(there[name], here[name]) for name in here)


def test_a_decoder_generates_on_the_device(llama: Path) -> None:
    prompts = np.array([[5, 6, 7, 8]])
    with sdpa_kernel(SDPBackend.MATH):
        m = artifacts(llama)
        here = generate_greedily(TorchDecoder(m.answering_model, m.contract), prompts, 4)
        with stand_in() as gpu:
            there = generate_greedily(
                TorchDecoder(on(gpu, llama).answering_model, m.contract), prompts, 4
            )
    assert np.array_equal(there, here)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU")
def test_a_gpu_that_is_missing_is_refused(loaded: Path) -> None:
    with pytest.raises(MachineError) as refused:
        _ = artifacts(loaded, "cuda").reference_device
    assert refused.value.where == "validate.reference_device"
