"""Skeletons hold no weights; blocks come and go one by one; ties hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import EsmConfig

from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint
from optimizer.model.checkpoint.model import (
    _parameters_on_meta,
    build_skeleton,
    build_skeleton_from_config,
    list_parameter_shapes,
    load_torch_model,
    materialize,
    release,
)
from optimizer.recipe.schema import Task
from tests.load.conftest import Load
from tests.model.architectures.test_families import tiny_config

IDS = torch.arange(5, 17).reshape(2, 6)
WEIGHT = "encoder.layer.1.output.dense.weight"


@pytest.fixture
def checkpoint(load: Load, tiny_bert: Path) -> Checkpoint:
    return open_checkpoint(load(tiny_bert))


def meta_names(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.is_meta}


class Watched(Mapping[str, Tensor]):
    """Tensors that record the names that were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.read = tensors, list[str]()

    def __getitem__(self, name: str) -> Tensor:
        self.read.append(name)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_a_skeleton_has_no_weights_but_its_buffers(checkpoint: Checkpoint) -> None:
    model = build_skeleton(checkpoint, "sentence-embedding")
    assert meta_names(model) == set(list_parameter_shapes(model))
    assert not any(b.is_meta for b in model.buffers())
    assert model.pooler is None
    assert not model.training
    assert model.config._attn_implementation == "eager"


def test_a_block_is_filled_alone_and_sent_back(checkpoint: Checkpoint) -> None:
    model = build_skeleton(checkpoint, "sentence-embedding")
    everything = meta_names(model)
    watched = Watched(checkpoint.tensors)
    materialize(model, "encoder.layer.1", watched)
    block = {n for n in everything if n.startswith("encoder.layer.1.")}
    assert set(watched.read) == block
    assert meta_names(model) == everything - block
    release(model, "encoder.layer.1")
    assert meta_names(model) == everything


def test_a_prefix_is_a_whole_name(checkpoint: Checkpoint) -> None:
    model = build_skeleton(checkpoint, "sentence-embedding")
    watched = Watched(checkpoint.tensors)
    materialize(model, "encoder.layer.1.output.dens", watched)
    assert watched.read == []
    materialize(model, "encoder.layer.1.output.dense", watched)
    assert set(watched.read) == {WEIGHT, WEIGHT.replace("weight", "bias")}


def test_block_by_block_equals_all_at_once(checkpoint: Checkpoint) -> None:
    model = build_skeleton(checkpoint, "sentence-embedding")
    for prefix in ("embeddings", "encoder.layer.0", "encoder.layer.1"):
        materialize(model, prefix, checkpoint.tensors)
    with torch.no_grad():
        whole = load_torch_model(checkpoint, "sentence-embedding")(IDS)[0]
        assert torch.equal(model(IDS)[0], whole)


def test_an_override_stands_in_for_the_checkpoints_value(checkpoint: Checkpoint) -> None:
    value = checkpoint.tensors[WEIGHT] * 2
    model = load_torch_model(checkpoint, "sentence-embedding", {WEIGHT: value})
    assert torch.equal(model.get_parameter(WEIGHT), value)
    other = WEIGHT.replace(".1.", ".0.")
    assert torch.equal(model.get_parameter(other), checkpoint.tensors[other])


def test_an_override_of_another_shape_is_an_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=WEIGHT):
        load_torch_model(checkpoint, "sentence-embedding", {WEIGHT: torch.zeros(2, 2)})


def test_a_missing_tensor_is_an_error(checkpoint: Checkpoint) -> None:
    tensors = {n: t for n, t in checkpoint.tensors.items() if n != WEIGHT}
    with pytest.raises(KeyError, match=WEIGHT):
        materialize(build_skeleton(checkpoint, "sentence-embedding"), "", tensors)


def test_tied_parameters_stay_tied_and_are_read_once() -> None:
    model = build_skeleton_from_config(tiny_config("bert"), "feature-extraction")
    first, second = (model.encoder.layer[i].output.dense for i in (0, 1))
    second.weight = first.weight
    values = {n: torch.randn(s) for n, s in list_parameter_shapes(model).items()}
    assert WEIGHT not in values
    watched = Watched(values)
    materialize(model, "", watched)
    assert second.weight is first.weight
    assert len(watched.read) == len(set(watched.read)) == len(values)
    release(model, "encoder.layer.0")
    assert second.weight is first.weight


def test_a_tie_that_a_constructor_makes_survives_the_meta_device() -> None:
    with _parameters_on_meta():
        first, second = nn.Linear(3, 4), nn.Linear(3, 4)
        second.weight = first.weight
    assert second.weight is first.weight
    assert first.weight.is_meta


@pytest.mark.parametrize("model_type", ["modernbert", "mpnet", "deberta-v2", "albert"])
def test_computed_buffers_equal_those_of_an_ordinary_model(model_type: str) -> None:
    from transformers import AutoModel

    config = tiny_config(model_type)
    ours = dict(build_skeleton_from_config(config, "feature-extraction").named_buffers())
    theirs = dict(AutoModel.from_config(config).named_buffers())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)


def test_tensors_are_read_anew_and_never_shared(checkpoint: Checkpoint) -> None:
    checkpoint.tensors[WEIGHT].zero_()
    assert checkpoint.tensors[WEIGHT].any()
    assert checkpoint.shape(WEIGHT) == (64, 128)


@pytest.mark.parametrize("task", ["sentence-embedding", "text-classification"])
def test_a_module_that_no_output_is_made_of_is_left_out(task: Task) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = EsmConfig(**sizes, vocab_size=40, pad_token_id=0, mask_token_id=1)
    model = build_skeleton_from_config(config, task)
    assert not any("contact_head" in name for name, _ in model.named_parameters())
