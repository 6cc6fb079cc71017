"""Table of timm architectures that transformers has too: their configs and their tensors' names.

transformers' wrapper for timm folders needs timm and torchvision; a checkpoint of transformers' own
class needs neither. The row of an architecture follows from its name alone.

timm 1.0: models/vision_transformer.py, resnet.py, convnext.py, efficientnet.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CONVOLUTION = ".convolution."
_NORM = ".normalization."
_QKV = tuple(f"attention.{n}_proj" for n in "qkv")


@dataclass(frozen=True)
class TimmArchitecture:
    """An architecture of timm whose checkpoints load reads as a model of transformers.

    names: (pattern of a name in timm, its names in transformers); the first full match applies, and
        several names share the tensor's rows equally, in this order
    """

    fields: Mapping[str, Any]  # transformers' config
    pool: str  # timm's name for the pooling of transformers' class
    names: Sequence[tuple[str, tuple[str, ...]]]

    def renamed(self, name: str) -> tuple[str, ...]:
        """Translate the name of timm's tensor `name` to transformers' names; () where transformers
        has none."""
        for pattern, targets in self.names:
            if match := re.fullmatch(pattern, name):
                return tuple(match.expand(target) for target in targets)
        return ()


def _vit(size: str, patch: int, side: int) -> TimmArchitecture:
    width, depth = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}[
        size
    ]
    fields = {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
        "image_size": side,
        "patch_size": patch,
        "layer_norm_eps": 1e-6,
    }
    return TimmArchitecture(fields, "token", _VIT)


def _resnet(depth: int) -> TimmArchitecture:
    basic = depth in (18, 34)
    fields = {
        "model_type": "resnet",
        "architectures": ["ResNetForImageClassification"],
        "layer_type": "basic" if basic else "bottleneck",
        "embedding_size": 64,
        "hidden_sizes": [64 * 2**i * (1 if basic else 4) for i in range(4)],
        "depths": {
            18: [2, 2, 2, 2],
            26: [2, 2, 2, 2],
            34: [3, 4, 6, 3],
            50: [3, 4, 6, 3],
            101: [3, 4, 23, 3],
            152: [3, 8, 36, 3],
        }[depth],
    }
    return TimmArchitecture(fields, "avg", _RESNET)


def _convnext(size: str) -> TimmArchitecture:
    width, third = {"tiny": (96, 9), "small": (96, 27), "base": (128, 27), "large": (192, 27)}[size]
    fields = {
        "model_type": "convnext",
        "architectures": ["ConvNextForImageClassification"],
        "hidden_sizes": [width * 2**i for i in range(4)],
        "depths": [3, 3, third, 3],
        "layer_norm_eps": 1e-6,
    }
    return TimmArchitecture(fields, "avg", _CONVNEXT)


# (width, depth, side) of tf_efficientnet_b0 to b7
_EFFICIENTNETS = (
    (1.0, 1.0, 224), (1.0, 1.1, 240), (1.1, 1.2, 260), (1.2, 1.4, 300),
    (1.4, 1.8, 380), (1.6, 2.2, 456), (1.8, 2.6, 528), (2.0, 3.1, 600),
)  # fmt: skip
_REPEATS, _STRIDES = (1, 2, 2, 3, 3, 4, 1), (1, 2, 2, 2, 1, 2, 1)


def _efficientnet(size: int) -> TimmArchitecture:
    """EfficientNet for its nominal image size, which decides the padding of convolutions of stride
    2. transformers pads all sides equally in the blocks that depthwise_padding lists."""
    width, depth, side = _EFFICIENTNETS[size]
    repeats = [math.ceil(n * depth) for n in _REPEATS]
    firsts = [sum(repeats[:i]) for i in range(len(repeats))]
    alike, rows = [], (side + 1) // 2  # after the stem
    for first, stride in zip(firsts, _STRIDES, strict=True):
        alike += [first] if stride == 2 and rows % 2 else []
        rows = math.ceil(rows / stride)
    fields = {
        "model_type": "efficientnet",
        "architectures": ["EfficientNetForImageClassification"],
        "width_coefficient": width,
        "depth_coefficient": depth,
        "image_size": side,
        "hidden_dim": int(1280 * width),
        "num_block_repeats": list(_REPEATS),
        "strides": list(_STRIDES),
        "depthwise_padding": alike,
        "num_hidden_layers": 4 * sum(repeats),
    }
    return TimmArchitecture(fields, "avg", _efficientnet_names(repeats))


def _efficientnet_names(repeats: Sequence[int]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Architecture.names of EfficientNet: timm numbers blocks per stage, transformers
    consecutively; blocks of the first stage have no expansion. repeats: blocks per stage."""
    ends, encoder = ".depthwise_conv.depthwise_", "efficientnet.encoder."
    parts = {"se.conv_reduce": ".squeeze_excite.reduce", "se.conv_expand": ".squeeze_excite.expand"}
    first = {"conv_pw": ".projection.project_conv", "bn2": ".projection.project_bn"}
    first |= {"conv_dw": f"{ends}conv", "bn1": f"{ends}norm", **parts}
    others = {"conv_pw": ".expansion.expand_conv", "bn1": ".expansion.expand_bn"}
    others |= {"conv_dw": f"{ends}conv", "bn2": f"{ends}norm", **parts}
    others |= {"conv_pwl": ".projection.project_conv", "bn3": ".projection.project_bn"}
    names = [("conv_stem", "efficientnet.embeddings.convolution"), ("classifier", "classifier")]
    names += [("bn1", "efficientnet.embeddings.batchnorm")]
    names += [("conv_head", f"{encoder}top_conv"), ("bn2", f"{encoder}top_bn")]
    places = [(i, j) for i, count in enumerate(repeats) for j in range(count)]
    for block, (i, j) in enumerate(places):
        for old, new in (others if i else first).items():
            names.append((f"blocks.{i}.{j}.{old}", f"{encoder}blocks.{block}{new}"))
    return tuple((rf"{re.escape(old)}\.(\w+)", (rf"{new}.\1",)) for old, new in names)


_VIT = (
    (r"cls_token", (r"vit.embeddings.cls_token",)),
    (r"pos_embed", (r"vit.embeddings.position_embeddings",)),
    (r"patch_embed\.proj\.(\w+)", (r"vit.embeddings.patch_embeddings.projection.\1",)),
    (r"blocks\.(\d+)\.attn\.qkv\.(\w+)", tuple(rf"vit.layers.\1.{n}.\2" for n in _QKV)),
    (r"blocks\.(\d+)\.attn\.proj\.(\w+)", (r"vit.layers.\1.attention.o_proj.\2",)),
    (r"blocks\.(\d+)\.norm1\.(\w+)", (r"vit.layers.\1.layernorm_before.\2",)),
    (r"blocks\.(\d+)\.norm2\.(\w+)", (r"vit.layers.\1.layernorm_after.\2",)),
    (r"blocks\.(\d+)\.(mlp\.fc[12]\.\w+)", (r"vit.layers.\1.\2",)),
    (r"norm\.(\w+)", (r"vit.layernorm.\1",)),
    (r"head\.(\w+)", (r"classifier.\1",)),
)


def _resnet_names() -> tuple[tuple[str, tuple[str, ...]], ...]:
    names = [(r"conv1\.(\w+)", r"resnet.embedder.embedder.convolution.\1")]
    names += [(r"bn1\.(\w+)", r"resnet.embedder.embedder.normalization.\1")]
    for stage in range(4):
        old, new = rf"layer{stage + 1}\.(\d+)\.", rf"resnet.encoder.stages.{stage}.layers.\1."
        for i in range(3):
            names += [(rf"{old}conv{i + 1}\.(\w+)", rf"{new}layer.{i}{_CONVOLUTION}\2")]
            names += [(rf"{old}bn{i + 1}\.(\w+)", rf"{new}layer.{i}{_NORM}\2")]
        names += [(rf"{old}downsample\.0\.(\w+)", rf"{new}shortcut{_CONVOLUTION}\2")]
        names += [(rf"{old}downsample\.1\.(\w+)", rf"{new}shortcut{_NORM}\2")]
    return tuple((old, (new,)) for old, new in [*names, (r"fc\.(\w+)", r"classifier.1.\1")])


_RESNET = _resnet_names()
_BLOCK, _LAYER = r"stages\.(\d+)\.blocks\.(\d+)\.", r"convnext.encoder.stages.\1.layers.\2."
_CONVNEXT = (
    (r"stem\.0\.(\w+)", (r"convnext.embeddings.patch_embeddings.\1",)),
    (r"stem\.1\.(\w+)", (r"convnext.embeddings.layernorm.\1",)),
    (
        r"stages\.(\d+)\.downsample\.(\d)\.(\w+)",
        (r"convnext.encoder.stages.\1.downsampling_layer.\2.\3",),
    ),
    (rf"{_BLOCK}gamma", (rf"{_LAYER}layer_scale_parameter",)),
    (rf"{_BLOCK}conv_dw\.(\w+)", (rf"{_LAYER}dwconv.\3",)),
    (rf"{_BLOCK}norm\.(\w+)", (rf"{_LAYER}layernorm.\3",)),
    (rf"{_BLOCK}mlp\.fc([12])\.(\w+)", (rf"{_LAYER}pwconv\3.\4",)),
    (r"head\.norm\.(\w+)", (r"convnext.layernorm.\1",)),
    (r"head\.fc\.(\w+)", (r"classifier.\1",)),
)

SIZES = "(tiny|small|base|large)"
COVERED = (
    f"vit_{SIZES}_patch<p>_<side>, deit_{SIZES}_patch<p>_<side>, convnext_{SIZES}, "
    "resnet18, 26, 34, 50, 101 and 152, tf_efficientnet_b0 to b7"
)


def find_architecture(name: str) -> TimmArchitecture | None:
    """Look up how load reads a timm checkpoint of architecture `name`; None for a name that is not
    in COVERED."""
    if match := re.fullmatch(rf"(?:vit|deit)_{SIZES}_patch(\d{{1,2}})_(\d{{2,4}})", name):
        return _vit(match[1], int(match[2]), int(match[3]))
    if match := re.fullmatch(r"resnet(18|26|34|50|101|152)", name):
        return _resnet(int(match[1]))
    if match := re.fullmatch(r"tf_efficientnet_b([0-7])", name):
        return _efficientnet(int(match[1]))
    if match := re.fullmatch(rf"convnext_{SIZES}", name):
        return _convnext(match[1])
    return None
