"""Pack weights as other projects do, one value at a time, for testing the readers.

Integers (out, in) and zero points (out, groups) are unsigned, scales are (out, groups).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import heavy_tailed

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def gptq(
    codes: Tensor, zeros: Tensor, scales: Tensor, bits: int, *, version: int = 1
) -> dict[str, Tensor]:
    """AutoGPTQ's QuantLinear.pack: rows of inputs in qweight, columns of outputs in qzeros; the
    first version stores zero points minus one."""
    per_word = 32 // bits
    inputs = codes.t().numpy().astype(np.uint32)
    qweight = np.zeros((inputs.shape[0] // per_word, inputs.shape[1]), np.uint32)
    for row in range(qweight.shape[0]):
        for j in range(per_word):
            qweight[row] |= inputs[row * per_word + j] << np.uint32(bits * j)
    points = (zeros.t() - (1 if version == 1 else 0)).numpy().astype(np.uint32)
    qzeros = np.zeros((points.shape[0], points.shape[1] // per_word), np.uint32)
    for column in range(qzeros.shape[1]):
        for j in range(per_word):
            qzeros[:, column] |= points[:, column * per_word + j] << np.uint32(bits * j)
    groups = scales.shape[1]
    return {
        "qweight": torch.from_numpy(qweight.view(np.int32)),
        "qzeros": torch.from_numpy(qzeros.view(np.int32)),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // (codes.shape[1] // groups)).to(torch.int32),
    }


def gptq_values(packed: dict[str, Tensor], bits: int, *, version: int = 1) -> Tensor:
    """AutoGPTQ's QuantLinear.forward: the weight (out, in) it multiplies with, in float32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask = 2**bits - 1
    zeros = (packed["qzeros"][:, :, None] >> shifts[None, None]) & mask
    zeros = zeros.reshape(packed["scales"].shape) + (1 if version == 1 else 0)
    weight = (packed["qweight"][:, None, :] >> shifts[None, :, None]) & mask
    weight = weight.reshape(-1, weight.shape[2])
    group = packed["g_idx"].long()
    return (packed["scales"].float()[group] * (weight - zeros[group])).t()


def awq(codes: Tensor, zeros: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """AutoAWQ's WQLinear_GEMM.from_linear: eight outputs per word, in AWQ's order."""

    def words(values: Tensor) -> Tensor:
        given = values.t().numpy().astype(np.uint32)
        made = np.zeros((given.shape[0], given.shape[1] // 8), np.uint32)
        for column in range(made.shape[1]):
            for i in range(8):
                made[:, column] |= given[:, column * 8 + AWQ_COLUMNS[i]] << np.uint32(4 * i)
        return torch.from_numpy(made.view(np.int32))

    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.t().contiguous()}


def awq_values(packed: dict[str, Tensor]) -> Tensor:
    """AutoAWQ's dequantize_gemm, in float32, as (out, in)."""
    shifts = torch.arange(0, 32, 4)
    reverse = [0, 4, 1, 5, 2, 6, 3, 7]

    def unpacked(words: Tensor) -> Tensor:
        values = (words[:, :, None] >> shifts[None, None]).reshape(len(words), -1)
        order = torch.arange(values.shape[1]).view(-1, 8)[:, reverse].reshape(-1)
        return values[:, order] & 15

    repeat = packed["qweight"].shape[0] // packed["scales"].shape[0]
    zeros = unpacked(packed["qzeros"]).repeat_interleave(repeat, 0)
    scales = packed["scales"].float().repeat_interleave(repeat, 0)
    return ((unpacked(packed["qweight"]) - zeros) * scales).t()


def coded(
    out: int, inputs: int, groups: int, bits: int, seed: int, *, symmetric: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Random unsigned integers, zero points (the middle when symmetric), float16 scales."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (out, inputs), generator=g)
    zeros = torch.randint(1, 1 << bits, (out, groups), generator=g)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (bits - 1))
    scales = (heavy_tailed((out, groups), seed).abs() + 1e-3).half()
    return codes, zeros, scales


def put(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A folder of those tensors with a config of a llama."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"model_type": "llama", "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(document))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    return folder


def named(module: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}.{name}": t for name, t in tensors.items()}


def linears(folder: Path) -> dict[str, Tensor]:
    """The matrices of a checkpoint's linear layers, without the embedding."""
    tensors = load_file(folder / "model.safetensors")
    return {n: t for n, t in tensors.items() if t.ndim == 2 and "embed" not in n}
