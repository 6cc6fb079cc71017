"""ONNX files of several exporters, and rows for them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import nn


class Residual(nn.Module):
    """Convolutions with a norm, swish, a residual add and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.wide = nn.Conv2d(8, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 8, 3, padding=1)
        self.fc = nn.Linear(8, 6)
        nn.init.uniform_(self.norm.running_mean, -1, 1)
        nn.init.uniform_(self.norm.running_var, 0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = x + self.narrow(nn.functional.silu(self.wide(x)))
        return self.fc(nn.functional.max_pool2d(x, 2).flatten(2).amax(2))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Ids and a mask to one score, by one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 3)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(self.norm(x)).split(16, -1)
        scores = q @ k.transpose(1, 2) / 4 + (1 - mask.float())[:, None] * -1e4
        x = x + self.out(scores.softmax(-1) @ v)
        return self.head(x[:, 0])  # type: ignore[no-any-return]


def legacy(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    file: Path,
    opset: int,
    *,
    batch: bool = True,
) -> Path:
    """Export by torch's tracer. batch: the first axis is dynamic"""
    torch.manual_seed(0)
    axes = {name: {0: "n"} for name in (*inputs, "y")} if batch else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            tuple(inputs.values()),
            str(file),
            opset_version=opset,
            dynamo=False,
            input_names=list(inputs),
            output_names=["y"],
            dynamic_axes=axes,
        )
    return file


def images(rows: int) -> dict[str, torch.Tensor]:
    return {"images": torch.randn(rows, 3, 16, 16)}


def by_hand(
    file: Path,
    nodes: Sequence[Any],
    weights: Mapping[str, Any],
    shape: Sequence[Any] = ("n", 8),
    opset: int = 17,
    kind: int = onnx.TensorProto.FLOAT,
    output: tuple[int, int] = (onnx.TensorProto.FLOAT, 2),
) -> Path:
    """Write a graph from input x to output y. output: type and number of axes of y"""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info("x", kind, list(shape))],
        [helper.make_tensor_value_info("y", output[0], [None] * output[1])],
        [numpy_helper.from_array(np.asarray(a), n) for n, a in weights.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    file.write_bytes(model.SerializeToString())
    return file


def weights(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
