"""Every row of the table that takes images is true of the architecture it describes."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from optimizer.compress.walk.model_source import ModelSource
from optimizer.harness.inputs.image import IMAGE
from optimizer.load import weights
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.recognise import list_linears
from optimizer.model.checkpoint.model import (
    build_skeleton_from_config,
    list_parameter_shapes,
    materialize,
)
from optimizer.recipe.schema import Model
from tests.model.architectures.test_families import scale_pair
from tests.vision import SIDE, TASKS, config, write

CLASSIFY, FEATURES = "image-classification", "image-feature-extraction"
SIDES = {"clip_vision_model", "siglip_vision_model"}
"""Parts of a pair, built by model/checkpoint/tower_model.py."""
OF_IMAGES = sorted(n for n, f in FAMILIES.items() if f.inputs == IMAGE.name and n not in SIDES)
WITH_FEATURES = [n for n in OF_IMAGES if n not in {"depth_anything", "vitpose"}]
"""Those that have an AutoModel."""
ALIKE = [n for n in OF_IMAGES if not FAMILIES[n].uneven]
IMAGES = torch.randn((2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(3))


def random_model(model_type: str) -> nn.Module:
    task = FEATURES if model_type in WITH_FEATURES else TASKS[model_type]
    model = build_skeleton_from_config(config(model_type), task, trust_remote_code=True)
    g = torch.Generator().manual_seed(0)
    values = {n: torch.randn(s, generator=g) * 0.3 for n, s in list_parameter_shapes(model).items()}
    materialize(model, "", values)
    return model


@pytest.mark.parametrize("model_type", ALIKE)
def test_a_row_names_the_linears_of_every_block_and_the_base_of_a_classifier(
    model_type: str,
) -> None:
    facts = FAMILIES[model_type]
    for task in (TASKS[model_type],) if model_type in TASKS else (FEATURES, CLASSIFY):
        model, prefix = build_skeleton_from_config(config(model_type), task), facts.prefix(task)
        blocks = model.get_submodule(prefix + facts.blocks)
        assert isinstance(blocks, nn.ModuleList)
        assert len(blocks) >= 2
        for block in blocks:
            assert sorted(list_linears(block)) == sorted(facts.linears)
        assert isinstance(model.get_submodule(prefix + facts.embeddings), nn.Module)


@pytest.mark.parametrize("model_type", ["regnet", "resnet"])
@pytest.mark.parametrize("layer_type", ["basic", "bottleneck"])
@pytest.mark.parametrize("task", [FEATURES, CLASSIFY])
def test_a_row_of_unequal_blocks_names_the_weighted_modules_that_any_of_them_has(
    model_type: str, layer_type: str, task: str
) -> None:
    facts, kind = FAMILIES[model_type], "y" if model_type == "regnet" else layer_type
    model = build_skeleton_from_config(config(model_type, depths=[2, 2], layer_type=kind), task)
    source = ModelSource(model, {}, facts, facts.prefix(task))
    assert len(source.blocks) == 4
    weighted = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    outside = {n for n in weighted if not source.inside(n, source.blocks)}
    assert all(source.embedding in n or n.startswith("classifier") for n in outside)
    listed = {f"{block}.{name}" for block in source.blocks for name in facts.linears}
    gates = {n for n in weighted if ".attention." in n}  # of RegNet Y: they stay float
    assert set(weighted) - outside - gates == listed & set(weighted)


@pytest.mark.parametrize(
    ("model_type", "count"),
    [
        ("efficientnet", 1 + 2 * 2 + 3 * 3),
        ("efficientnet_lite", 2 + 2 + 3 * 3),
        ("mobilenet_v2", 3 + 16 * 3 + 1),
    ],
)
@pytest.mark.parametrize("task", [FEATURES, CLASSIFY])
def test_a_row_of_inverted_residuals_names_every_convolution_of_its_blocks(
    task: str, model_type: str, count: int
) -> None:
    facts = FAMILIES[model_type]
    model = build_skeleton_from_config(config(facts.model_type), task, trust_remote_code=True)
    source = ModelSource(model, {}, facts, facts.prefix(task))
    listed = {f"{block}.{name}" for block in source.blocks for name in facts.linears}
    filters = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    floats = (".squeeze_excite.", "encoder.top_conv")  # of EfficientNet: gates, and in no block
    convolutions = {n for n in filters if not any(f in n for f in floats)}
    assert convolutions == {n for n in listed if n in dict(model.named_modules())}
    assert len(convolutions) == count


def test_what_is_added_to_a_block_is_what_its_first_convolution_reads() -> None:
    """EfficientNet's blocks have an expansion or begin with the depthwise convolution."""
    facts, model = (
        FAMILIES["efficientnet"],
        build_skeleton_from_config(config("efficientnet"), FEATURES),
    )
    names = [n for n, _ in model.named_modules()]
    firsts = [
        facts.summands_of(f"encoder.blocks.{i}", names)[f"encoder.blocks.{i}.shortcut"].convolution
        for i in range(5)
    ]
    assert firsts == 2 * ["depthwise_conv.depthwise_conv"] + 3 * ["expansion.expand_conv"]


@pytest.mark.parametrize("model_type", ["convnext", "swin"])
@pytest.mark.parametrize("task", [FEATURES, CLASSIFY])
def test_a_row_of_unequal_blocks_names_their_linear_layers_and_what_lies_between_stages(
    model_type: str, task: str
) -> None:
    facts = FAMILIES[model_type]
    model = build_skeleton_from_config(config(model_type), task)
    source = ModelSource(model, {}, facts, facts.prefix(task))
    listed = {f"{block}.{name}" for block in source.blocks for name in facts.linears}
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linears - {"classifier"} == listed & linears
    stages = facts.blocks.partition(".*.")[0]
    inside = {n for n, _ in model.named_parameters() if f".{stages}." in f".{n}"}
    assert all(any(n.startswith(f"{block}.") for block in source.blocks) for n in inside)


@pytest.mark.parametrize(
    "model_type", [n for n in [*WITH_FEATURES, "vitpose"] if FAMILIES[n].smooth]
)
def test_a_smooth_pair_can_be_scaled_without_changing_the_function(model_type: str) -> None:
    facts, model = FAMILIES[model_type], random_model(model_type)
    prefix = "" if model_type in WITH_FEATURES else facts.prefix(TASKS[model_type])
    names = ModelSource(model, {}, facts, prefix).blocks
    images = IMAGES if model_type in WITH_FEATURES else IMAGES.repeat(1, 1, 2, 1)[:, :, :48]
    with torch.no_grad():
        before = model(images)[0]
        scaled = [
            (model.get_submodule(block), pair)
            for block, pair in product(names, facts.smooth)
            if f"{block}.{pair.producer}" in dict(model.named_modules())
        ]
        for block, pair in scaled:
            scale_pair(block, pair)
        stages = (
            model_type == "segformer"
        )  # its row has the layers of the longest stage there may be
        assert {pair for _, pair in scaled} == set(facts.smooth) or stages
        torch.testing.assert_close(model(images)[0], before, rtol=2e-4, atol=2e-5)
        # The check can fail: half of a pair alone changes the function.
        block, pair = scaled[-1]
        block.get_submodule(pair.consumers[-1]).weight *= 2
        assert not torch.allclose(model(images)[0], before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("model_type", WITH_FEATURES)
def test_weights_saved_with_a_head_are_found_by_the_encoder(
    model_type: str, tmp_path: Path
) -> None:
    from transformers import AutoModel

    source = write(tmp_path, model_type)
    model = build_skeleton_from_config(config(model_type), FEATURES, trust_remote_code=True)
    section = Model(source=str(source), task=FEATURES)
    match = weights.match(weights.find(source, section), model, section)
    materialize(model, "", {name: match.read(name) for name in match.source_names})
    theirs = AutoModel.from_pretrained(
        source, attn_implementation="eager", trust_remote_code=True
    ).eval()
    with torch.no_grad():
        assert torch.equal(model.eval()(IMAGES)[0], theirs(IMAGES)[0])
