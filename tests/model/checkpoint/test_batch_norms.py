"""A BatchNorm is folded where a checkpoint is opened: the function stays, the files too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.load.stage import STAGE as LOAD
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint import batch_norms
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton_from_config, load_torch_model
from optimizer.recipe.schema import Model
from tests.conftest import heavy_tailed
from tests.vision import SIDE, config, write

CLASSIFY = "image-classification"
UNIT = 2.0**-24


def pair(seed: int, bias: bool, groups: int) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    convolution = nn.Conv2d(4, 6 if groups < 4 else 4, 3, groups=groups, bias=bias)
    norm = nn.BatchNorm2d(convolution.out_channels, eps=1e-3).eval()
    with torch.no_grad():
        for i, values in enumerate((*convolution.parameters(), norm.weight, norm.bias)):
            values.copy_(heavy_tailed(tuple(values.shape), seed + i, 0.5))
        norm.running_mean.copy_(heavy_tailed(norm.running_mean.shape, seed + 7))
        norm.running_var.copy_(heavy_tailed(norm.running_var.shape, seed + 8).abs() + 1e-4)
    return convolution, norm


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_function_is_the_same_up_to_roundoff(bias: bool, groups: int) -> None:
    """Random norms, with variances so small that epsilon matters."""
    convolution, norm = pair(10, bias, groups)
    x = heavy_tailed((2, 4, 9, 9), 1)
    with torch.no_grad():
        exact = norm.double()(convolution.double()(x.double()))
        own = convolution.bias.float() if bias else None
        parts = norm.float().state_dict()
        weight, added = batch_norms.fold(convolution.weight.float(), own, parts, norm.eps)
        found = nn.functional.conv2d(x.double(), weight.double(), added.double(), groups=groups)
        # each weight and the bias are rounded once
        terms = nn.functional.conv2d(
            x.double().abs(), weight.double().abs(), added.double().abs(), groups=groups
        )
    assert ((found - exact).abs() <= terms * UNIT).all()


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet": ("resnet", {}),
    "regnet": ("regnet", {}),
    "padded by the size of the image": ("mobilenet_v2", {}),
    "padded alike": ("mobilenet_v2", {"tf_padding": False, "first_layer_is_expansion": False}),
    "of another epsilon": ("mobilenet_v2", {"layer_norm_eps": 0.1}),
    "of several names": ("efficientnet", {"batch_norm_eps": 0.1}),
    "pooled by the largest": ("efficientnet", {"pooling_type": "max"}),
}


@pytest.mark.parametrize(("kind", "changes"), KINDS.values(), ids=KINDS.keys())
def test_an_opened_checkpoint_is_the_model_of_its_files_without_norms(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForImageClassification

    source, out = write(tmp_path / kind, kind, **changes), tmp_path / "load"
    out.mkdir()
    LOAD.run(Model(source=str(source), task=CLASSIFY), out=out)
    checkpoint = open_checkpoint(out)
    ours = load_torch_model(checkpoint, CLASSIFY)
    theirs = AutoModelForImageClassification.from_pretrained(source).eval()
    assert not [m for m in ours.modules() if isinstance(m, nn.BatchNorm2d)]
    assert not [n for n in checkpoint.tensors if n.endswith(".running_var")]
    images = heavy_tailed((2, 3, SIDE, SIDE), 3)
    with torch.no_grad():
        torch.testing.assert_close(ours(images).logits, theirs(images).logits, rtol=1e-4, atol=1e-4)
    written = checkpoint.tensors.as_written
    parameters = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    assert all(torch.equal(written[n], parameters[n]) for n in written)


def test_padding_that_cuts_off_is_refused_where_a_checkpoint_is_opened(tmp_path: Path) -> None:
    """transformers makes it of a filter of one row with a stride of 2."""
    source = write(tmp_path / "cut", "efficientnet", kernel_sizes=[3, 1, 3])
    (tmp_path / "load").mkdir()
    LOAD.run(Model(source=str(source), task=CLASSIFY), out=tmp_path / "load")
    with pytest.raises(CheckpointError, match="depthwise_conv_pad crops"):
        load_torch_model(open_checkpoint(tmp_path / "load"), CLASSIFY)


def test_a_norm_of_another_epsilon_than_the_rows_is_refused() -> None:
    norms = FAMILIES["resnet"].batch_norms
    assert norms is not None
    model = build_skeleton_from_config(config("resnet"), CLASSIFY)
    model.get_submodule("resnet.encoder.stages.1.layers.0.layer.1.normalization").eps = 1e-3
    with pytest.raises(CheckpointError, match=r"stages.1.layers.0.layer.1.normalization has eps"):
        batch_norms.fold_skeleton(model, norms)
