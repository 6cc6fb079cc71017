"""Compression on a stand-in for a GPU (tests/gpu/stand_in.py): every method runs with all tensors
on one device, and gives the CPU's bytes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizer.compress import stage
from optimizer.compress.data import calibration
from optimizer.foundation.process.torch_device import CPU
from optimizer.recipe.compression.methods import METHODS, Method
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.schema import Calibrate, Compression, DataSpec
from tests.compress.checkpoints import contents
from tests.compress.decoders import GROUPS, LENGTH, TASK
from tests.gpu.stand_in import stand_in

FEW: dict[str, dict[str, Any]] = {
    "autoround": {"steps": 2},
    "scale_tuning": {"epochs": 1, "held_out": 2},
}
"""Options of methods that learn, to learn little."""
WALKED = [m for m in METHODS.values() if m.kind != "pass-through" and not m.folds_biases]
OTHERS: dict[str, dict[str, Any]] = {
    "keep_float_auto": {"method": "rtn", "keep_float_auto": {"max_error": 0.1, "max_share": 0.9}},
    "allocate": {"method": "rtn", "allocate": {"windows": 2}},
    "head": {"method": "gptq", "head": GROUPS},
    "bias_correction": {"method": "rtn", "bias_correction": True},
    "float8": {"method": "rtn", "weights": {"type": "float8"}, "activations": {"type": "float8"}},
    "float4": {
        "method": "rtn",
        "weights": {"type": "float4"},
        "activations": {"type": "float4"},
        "kv_cache": "float8",
    },
}


def quantized_by(method: Method) -> dict[str, Any]:
    """The smallest section in which the method runs."""
    section: dict[str, Any] = {"methods": [method.name], "weights": GROUPS}
    if method.needs_activations:
        section |= {"weights": {"bits": 8}, "activations": {}}
    if method.name in FEW:
        section |= {method.name: FEW[method.name]}
    return section


def compressed(source: Path, out: Path, quantize: dict[str, Any], on_gpu: bool) -> dict[str, bytes]:
    rows = DataSpec(source="json", files=(str(source.with_suffix(".jsonl")),))
    pruned = Sparsity(method="sparsegpt") if quantize.get("methods") == ["float_weights"] else None
    section = Compression(
        calibrate=Calibrate(data=rows, samples=8, sequence_length=LENGTH, batch_size=3),
        quantize=Quantize.model_validate_json(json.dumps(quantize)),
        task=TASK,
        sparsity=pruned,
    ).effective
    batches = partial(calibration.make_batches, section, source)
    out.mkdir()
    # a GPU has other kernels of attention than the CPU; the stand-in has those that both have
    with sdpa_kernel(SDPBackend.MATH):
        if on_gpu:
            with stand_in() as device:
                stage.compress(section, source, batches, out, device)
        else:
            stage.compress(section, source, batches, out, CPU)
    return contents(out)


CASES = {m.name: quantized_by(m) for m in WALKED} | OTHERS


@pytest.mark.parametrize("quantize", CASES.values(), ids=CASES.keys())
def test_a_gpu_gets_every_tensor_and_gives_the_same_integers(
    quantize: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    there = compressed(llama, tmp_path / "gpu", quantize, on_gpu=True)
    assert there == compressed(llama, tmp_path / "cpu", quantize, on_gpu=False)
