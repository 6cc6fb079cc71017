"""ONNX files by both exporters of torch, of networks with random weights, for files.py."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.onnx import shapes

ROWS = {0: "rows"}


class Segmenter(nn.Module):
    """A U-Net of two sizes: transposed convolution, skip, resize."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 5, 1)
        self.norm = nn.BatchNorm2d(16).eval()

    def forward(self, images: Tensor) -> Tensor:
        first = functional.hardswish(self.norm(self.down(images)))
        joined = torch.cat([first, self.up(functional.relu(self.deep(first)))], 1)
        return functional.interpolate(self.head(joined), scale_factor=2.0, mode="bilinear")


class Recurrent(nn.Module):
    """An LSTM or GRU between linear layers."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.enter, self.memory = nn.Linear(12, 24), kind(24, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.memory(self.enter(steps).relu())[0][:, -1])  # type: ignore[no-any-return]


class Sound(nn.Module):
    """1-D convolutions in front of a transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 16, 9, 4, 4), nn.Conv1d(16, 32, 5, 4, 2)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)

    def forward(self, waves: Tensor) -> Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(waves[:, None]))))
        return self.layer(x.transpose(1, 2)).mean(1)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Experts that are all computed and weighted by a gate, by einsum and a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 3)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        return torch.einsum("bek,be->bk", torch.stack([e(x) for e in self.experts], 1), shares)


class Chosen(nn.Module):
    """A vector per row, and the index of its largest value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        return logits, logits.argmax(-1)


def of_transformers(kind: str, auto: str, **fields: Any) -> nn.Module:
    """A model of transformers by its config, with random weights."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **fields)
    return getattr(transformers, auto).from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


def _networks() -> dict[str, tuple[nn.Module, dict[str, Tensor], dict[str, Any]]]:
    """{name: (network, inputs, {"opset", "dynamo"})}."""
    images = {"images": torch.randn(2, 3, 32, 32)}
    pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
    steps, ids = {"steps": torch.randn(2, 7, 12)}, torch.randint(1, 60, (2, 9))
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    layers = {"num_hidden_layers": 2}
    text = {**small, **layers, "vocab_size": 60, "max_position_embeddings": 32}
    vision = {**small, **layers, "image_size": 32, "patch_size": 8}
    resnet = {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 8}
    stages = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
    swin = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1]}
    swin |= {"num_heads": [2, 4], "window_size": 4}
    mixed = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_encoder_blocks": 2}
    mixed |= {"num_attention_heads": [1, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}
    mixed |= {"patch_sizes": [7, 3], "strides": [4, 2]}
    mixed_head = {"decoder_hidden_size": 16}
    classify = "AutoModelForImageClassification"
    square = {"images": torch.rand(1, 3, shapes.SIZE, shapes.SIZE)}
    return {
        "segmenter-13": (Segmenter(), images, {"opset": 13}),
        "segmenter": (Segmenter(), images, {"dynamo": True}),
        "detector-12": (shapes.Detector(), square, {"opset": 12, "single": True}),
        "lstm-14": (Recurrent(nn.LSTM), steps, {"opset": 14}),
        "gru-17": (Recurrent(nn.GRU), steps, {"opset": 17}),
        "lstm": (Recurrent(nn.LSTM), steps, {"dynamo": True}),
        "sound-16": (Sound(), {"waves": torch.randn(2, 256)}, {"opset": 16}),
        "sound": (Sound(), {"waves": torch.randn(2, 256)}, {"dynamo": True}),
        "experts-18": (Experts(), {"x": torch.randn(2, 16)}, {"opset": 18}),
        "experts-23": (Experts(), {"x": torch.randn(2, 16)}, {"dynamo": True, "opset": 23}),
        "chosen-11": (Chosen(), {"x": torch.randn(2, 8)}, {"opset": 11}),
        "bert-14": (
            of_transformers("bert", "AutoModelForSequenceClassification", **text),
            tokens,
            {"opset": 14},
        ),
        "gpt2": (
            of_transformers("gpt2", "AutoModelForCausalLM", n_embd=32, n_layer=2, n_head=4),
            {"input_ids": ids},
            {"dynamo": True},
        ),
        "vit": (of_transformers("vit", classify, **vision), pixels, {"dynamo": True}),
        "resnet-11": (of_transformers("resnet", classify, **resnet), pixels, {"opset": 11}),
        "resnet": (of_transformers("resnet", classify, **resnet), pixels, {"dynamo": True}),
        "convnext": (of_transformers("convnext", classify, **stages), pixels, {"dynamo": True}),
        "swin": (of_transformers("swin", classify, **swin), pixels, {"dynamo": True}),
        "segformer": (
            of_transformers("segformer", "AutoModelForSemanticSegmentation", **mixed, **mixed_head),
            pixels,
            {"dynamo": True},
        ),
    }


def write(folder: Path) -> dict[str, Path]:
    """Export every network whose file is not there yet; {name: file}."""
    torch.manual_seed(0)
    files = {}
    for name, (network, inputs, how) in _networks().items():
        files[name] = folder / f"{name}.onnx"
        if not files[name].is_file():
            export(network.eval(), inputs, files[name], **how)
    return files


class _First(nn.Module):
    """A network whose answer is the first of its outputs, by name or place."""

    def __init__(self, network: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.network, self.names = network, names

    def forward(self, *inputs: Tensor) -> Any:
        answer = self.network(**dict(zip(self.names, inputs, strict=True)))
        return answer.logits if hasattr(answer, "logits") else answer


def export(
    network: nn.Module,
    inputs: Mapping[str, Tensor],
    file: Path,
    opset: int | None = None,
    dynamo: bool = False,
    single: bool = False,
) -> None:
    """Write a network with an open first axis; single: of one row."""
    model, names = _First(network, tuple(inputs)).eval(), list(inputs)
    values: Any = tuple(v[:1] if single else v for v in inputs.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            rows = torch.export.Dim("rows")
            sizes = ((dict.fromkeys(ROWS, rows),) * len(names),)
            program = torch.onnx.export(
                model,
                values,
                dynamo=True,
                input_names=names,
                dynamic_shapes=sizes,
                opset_version=opset,
                verbose=False,
            )
            assert program is not None
            program.save(str(file))
            return
        torch.onnx.export(
            model,
            values,
            str(file),
            dynamo=False,
            opset_version=opset,
            input_names=names,
            dynamic_axes=None if single else dict.fromkeys(names, ROWS),
        )
