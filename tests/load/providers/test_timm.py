"""Read a timm folder as transformers' class: equal tensors and outputs, the processor from
`pretrained_cfg`, and an error for arguments that change the model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.load.providers import timm as provider
from optimizer.load.providers.timm_architectures import find_architecture
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import (
    build_skeleton_from_config,
    list_parameter_shapes,
    load_torch_model,
)
from tests.hostile.written.checkpoints import WRONG
from tests.load.conftest import Load

CLASSIFY = "image-classification"
CONFIG: dict[str, Any] = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 3,
    "num_features": 192,
    "global_pool": "token",
    "label_names": ["cat", "dog", "bird"],
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "crop_mode": "center",
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.25, 0.3],
    },
}
# (what transformers calls it, what timm does)
IN_TIMM = (
    ("embeddings.cls_token", "cls_token"),
    ("embeddings.position_embeddings", "pos_embed"),
    ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
    ("layers.", "blocks."),
    ("attention.o_proj", "attn.proj"),
    ("layernorm_before", "norm1"),
    ("layernorm_after", "norm2"),
    ("layernorm", "norm"),
    ("classifier", "head"),
)


def of_timm(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """A ViT's tensors by timm's names, queries, keys and values in one."""
    made: dict[str, Tensor] = {}
    for name, tensor in parameters.items():
        renamed = name.removeprefix("vit.")
        for new, old in IN_TIMM:
            renamed = renamed.replace(new, old)
        if match := re.fullmatch(r"(.*)attention\.([qkv])_proj\.(\w+)", renamed):
            whole = f"{match[1]}attn.qkv.{match[3]}"
            made[whole] = torch.cat([*([made[whole]] if whole in made else []), tensor])
        else:
            made[renamed] = tensor
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ViT as timm saves it."""
    out = tmp_path_factory.mktemp("timm")
    (out / "config.json").write_text(json.dumps(CONFIG))
    shapes = list_parameter_shapes(
        build_skeleton_from_config(provider.config(out, CONFIG), CLASSIFY)
    )
    g = torch.Generator().manual_seed(0)
    tensors = {n: torch.randn(s, generator=g) * 0.1 for n, s in shapes.items()}
    save_file(of_timm(tensors), out / "model.safetensors")
    save_file(tensors, out / "expected.safetensors")
    return out


def test_every_tensor_is_found_under_its_name_in_transformers(folder: Path, load: Load) -> None:
    out = load(folder, CLASSIFY)
    written = load_file(out / "checkpoint/model.safetensors")
    expected = load_file(folder / "expected.safetensors")
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[n], expected[n]) for n in expected)


def test_labels_and_what_is_done_to_an_image_are_those_of_its_config(
    folder: Path, load: Load
) -> None:
    made = contracts.read(load(folder, CLASSIFY) / "contract.json")
    assert made.labels == ("cat", "dog", "bird")
    s = made.images
    assert (s.resize, s.crop, s.resample) == ({"shortest_edge": 248}, (224, 224), "bicubic")
    assert (s.mean, s.std) == ((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "tf_efficientnet_lite0"}, "make_efficientnet_lite0.py"),
        ({"architecture": "vit_tiny_r_s16_p8_224"}, "not covered"),
        ({"global_pool": "avg"}, "token"),
        ({"model_args": {"init_values": 1e-5}}, "init_values"),
        ({"num_classes": 4}, "num_classes"),
        ({"pretrained_cfg": {**CONFIG["pretrained_cfg"], "crop_pct": None}}, "crop_pct"),
        ({"pretrained_cfg": {**CONFIG["pretrained_cfg"], "crop_mode": "squash"}}, "crop_mode"),
        ({"pretrained_cfg": {**CONFIG["pretrained_cfg"], "std": [0.5]}}, "std"),
    ],
)
def test_what_would_be_another_model_is_refused_by_its_config_alone(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError, match=named):
        provider.config(tmp_path, {**CONFIG, **change})


FIELDS = [(name,) for name in CONFIG if name != "num_features"] + [("model_args",)]
FIELDS += [("pretrained_cfg", name) for name in CONFIG["pretrained_cfg"]]
MEANT = {  # what of the wrong values is none there
    ("label_names", "null"), ("model_args", "null"), ("global_pool", "null"),
    ("crop_pct", "one"), ("crop_pct", "half"), ("crop_mode", "null"),
}  # fmt: skip


@pytest.mark.parametrize("path", FIELDS, ids=".".join)
def test_a_wrong_value_of_any_field_is_refused_from_the_config_alone(path: tuple[str, ...]) -> None:
    values = {**WRONG, "not numbers": [float("nan")] * 3, "endless": [10**400] * 3}
    for name, value in values.items():
        if (path[-1], name) in MEANT:
            continue
        raw = json.loads(json.dumps(CONFIG))
        holder = raw if len(path) == 1 else raw[path[0]]
        holder[path[-1]] = value
        with pytest.raises(CheckpointError):
            provider.config(Path("/nowhere"), raw)


def test_positions_of_another_side_are_refused() -> None:
    image = {**CONFIG["pretrained_cfg"], "input_size": [3, 384, 384]}
    with pytest.raises(CheckpointError, match=r"384 was found.*is 224"):
        provider.config(Path("/nowhere"), {**CONFIG, "pretrained_cfg": image})


def test_a_tensor_that_has_no_place_is_refused(folder: Path, load: Load, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "blocks.0.ls1.gamma": torch.ones(192)}, tmp_path / "more/model.safetensors"
    )
    (tmp_path / "more/config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.ls1\.gamma"):
        load(tmp_path / "more", CLASSIFY)


@pytest.mark.parametrize(
    ("size", "alike"),
    list(enumerate([[], [16], [5, 8, 16], [5, 18], [6], [13, 27], [31], [18]])),
)
def test_convolutions_that_meet_an_odd_number_of_rows_pad_alike(
    size: int, alike: list[int]
) -> None:
    """As in the configs of google/efficientnet-b0 to b7, which transformers converted."""
    record = find_architecture(f"tf_efficientnet_b{size}")
    assert record is not None
    assert record.fields["depthwise_padding"] == alike


def test_blocks_of_efficientnet_are_numbered_through_all_stages() -> None:
    record = find_architecture("tf_efficientnet_b0")
    assert record is not None
    project = "efficientnet.encoder.blocks.{}.projection.project_bn.running_var"
    assert record.renamed("blocks.0.0.bn2.running_var") == (project.format(0),)
    assert record.renamed("blocks.2.1.bn3.running_var") == (project.format(1 + 2 + 1),)
    assert record.renamed("blocks.2.2.bn3.running_var") == ()


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "resnet50",
        "vit_tiny_patch16_224",
        "deit_tiny_patch16_224",
        "convnext_tiny",
        "tf_efficientnet_b1",  # one convolution of stride 2 meets 15 rows
    ],
)
def test_its_logits_are_timms(name: str, load: Load, tmp_path: Path) -> None:
    """Compare with timm itself, where it is installed."""
    timm = pytest.importorskip("timm")
    from timm.models import save_for_hf

    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=5).eval()
    with torch.no_grad():
        for parameter, value in model.named_buffers():
            if parameter.endswith("running_var"):
                value.uniform_(0.5, 1.5)
            elif parameter.endswith("running_mean"):
                value.normal_(0, 0.1)
        for parameter, value in model.named_parameters():
            if parameter.endswith("gamma"):
                value.uniform_(0.1, 1)
        images = torch.randn(2, *model.pretrained_cfg["input_size"])
        expected = model(images)
        save_for_hf(model, tmp_path / "timm", safe_serialization=True)
        ours = load_torch_model(open_checkpoint(load(tmp_path / "timm", CLASSIFY)), CLASSIFY)
        torch.testing.assert_close(ours(images).logits, expected, rtol=1e-5, atol=1e-6)
