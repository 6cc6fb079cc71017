"""Every row of the table is true of the architecture it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.inputs.text import TEXT
from optimizer.load import weights
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.model.architectures.recognise import list_linears
from optimizer.model.checkpoint.model import (
    build_skeleton_from_config,
    list_parameter_shapes,
    materialize,
)
from optimizer.recipe.schema import Model, Task

DEBERTA_V3 = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
}
WITHOUT_POSITION_TABLE = {"deberta-v2", "modernbert"}
UNLISTED = ("roformer", "megatron-bert", "ernie", "rembert", "esm", "xmod")
OF_TEXT = sorted(n for n, f in FAMILIES.items() if f.inputs == TEXT.name)
SIDES = {"clip_text_model", "siglip_text_model"}
"""Parts of a pair, built by model/checkpoint/tower_model.py."""
ENCODERS = sorted(n for n in OF_TEXT if FAMILIES[n].kind == "encoder" and n not in SIDES)
DECODERS = sorted(n for n, f in FAMILIES.items() if f.kind == "decoder")
GROUPED = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
KV_HEADS = 2


def task_of(model_type: str) -> Task:
    return "text-generation" if model_type in DECODERS else "feature-extraction"


def tiny_config(model_type: str, **changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        model_type,
        vocab_size=99,
        hidden_size=32,
        embedding_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=40,
        pad_token_id=1,
        bos_token_id=2,
        cls_token_id=2,
        eos_token_id=3,
        sep_token_id=3,
        **(DEBERTA_V3 if model_type == "deberta-v2" else {}),
        **({"num_key_value_heads": KV_HEADS, "head_dim": 8} if model_type in GROUPED else {}),
        **({"word_embed_proj_dim": 32, "ffn_dim": 64} if model_type == "opt" else {}),
        **changes,
    )


def random_model(model_type: str, **changes: Any) -> tuple[nn.Module, Family]:
    """A model of the row's kind, with its head when it is a decoder."""
    config = tiny_config(model_type, **changes)
    model = build_skeleton_from_config(config, task_of(model_type))
    g = torch.Generator().manual_seed(0)
    values = {n: torch.randn(s, generator=g) * 0.3 for n, s in list_parameter_shapes(model).items()}
    materialize(model, "", values)
    return model, find_family(config, task_of(model_type))


def blocks_of(model: nn.Module, facts: Family) -> Any:
    return model.get_submodule(facts.prefix(task_of(facts.model_type)) + facts.blocks)


@pytest.mark.parametrize("model_type", OF_TEXT)
def test_a_row_names_the_linears_of_every_block(model_type: str) -> None:
    model, facts = random_model(model_type)
    prefix = facts.prefix(task_of(model_type))
    blocks = blocks_of(model, facts)
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        assert sorted(list_linears(block)) == sorted(facts.linears)
    assert isinstance(model.get_submodule(prefix + facts.embeddings), nn.Module)
    inside = (prefix + facts.blocks, facts.head or "-")
    outside = [n for n in list_linears(model) if not n.startswith(inside)]
    assert len(outside) <= 1, f"linears outside the blocks: {outside}"
    assert facts.shared_blocks == (len(blocks) != model.config.num_hidden_layers)


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoders_row_names_its_ends_and_what_its_blocks_write(model_type: str) -> None:
    model, facts = random_model(model_type)
    prefix = facts.prefix("text-generation")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert model.get_submodule(prefix + facts.embeddings) is embedding
    assert model.get_submodule(facts.head) is head
    norm: Any = model.get_submodule(prefix + facts.final_norm)
    assert tuple(norm.weight.shape) == (32,)
    assert set(facts.writes) | {facts.value, facts.output} - {""} <= set(facts.linears)
    block = blocks_of(model, facts)[0]
    with torch.no_grad():  # a block that writes nothing passes its input on
        for name in facts.writes:
            for parameter in block.get_submodule(name).parameters():
                parameter.zero_()
    seen: list[torch.Tensor] = []
    block.register_forward_hook(
        lambda _, given, out: seen.extend([given[0], out if torch.is_tensor(out) else out[0]])
    )
    with torch.no_grad():
        model(torch.arange(4, 14).reshape(2, 5))
    assert torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("model_type", ENCODERS)
def test_a_row_names_the_base_of_a_model_with_a_head(model_type: str) -> None:
    facts = FAMILIES[model_type]
    model = build_skeleton_from_config(tiny_config(model_type), "text-classification")
    prefix = facts.prefix("text-classification")
    assert isinstance(model.get_submodule(prefix + facts.blocks), nn.ModuleList)
    assert facts.prefix("sentence-embedding") == ""


def scale_pair(block: nn.Module, pair: SmoothPair) -> None:
    """Move a factor per channel from the producer to its consumers."""
    producer = block.get_submodule(pair.producer)
    index, parts = pair.part
    size = producer.weight.shape[0] // parts
    rows = slice(index * size, (index + 1) * size)
    factor = torch.rand(size, generator=torch.Generator().manual_seed(1)) + 0.5
    producer.weight[rows] /= factor[:, None] if producer.weight.ndim == 2 else factor
    if getattr(producer, "bias", None) is not None:
        producer.bias[rows] /= factor
    if pair.grouped:  # each key/value head is read by several query heads
        factor = factor.reshape(KV_HEADS, -1).repeat_interleave(4 // KV_HEADS, 0).reshape(-1)
    for name in pair.consumers:
        block.get_submodule(name).weight *= factor


POST_NORM_GELU = {"do_layer_norm_before": False, "activation_function": "gelu"}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [*((t, {}) for t in OF_TEXT if FAMILIES[t].smooth), ("opt", POST_NORM_GELU)],
)
def test_a_smooth_pair_can_be_scaled_without_changing_the_function(
    model_type: str, changes: dict[str, Any]
) -> None:
    model, facts = random_model(model_type, **changes)
    assert facts.smooth
    ids = torch.arange(4, 14).reshape(2, 5)
    with torch.no_grad():
        before = model(ids)[0]
        for pair in facts.smooth:
            for block in blocks_of(model, facts):
                if not isinstance(block.get_submodule(pair.producer), nn.Identity):
                    scale_pair(block, pair)
        after = model(ids)[0]
    torch.testing.assert_close(after, before, rtol=2e-4, atol=2e-5)
    with torch.no_grad():  # the check can fail: half of a pair alone changes the function
        block = blocks_of(model, facts)[-1]
        block.get_submodule(facts.smooth[-1].consumers[-1]).weight *= 2
        assert not torch.allclose(model(ids)[0], before, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("model_type", sorted({*ENCODERS} - WITHOUT_POSITION_TABLE))
def test_positions_start_where_the_row_says(model_type: str) -> None:
    """The longest text has max_position_embeddings tokens minus the padding's offset."""
    model, facts = random_model(model_type)
    longest = 40 - (2 if facts.positions_after_padding else 0)
    with torch.no_grad():
        model(torch.full((1, longest), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, longest + 1), 5))


@pytest.mark.parametrize("model_type", ENCODERS)
def test_weights_saved_with_a_head_are_found_by_the_encoder(
    model_type: str, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForMaskedLM

    config = tiny_config(model_type)
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    model = build_skeleton_from_config(config, "feature-extraction")
    section = Model(source=str(tmp_path), task="feature-extraction")
    found = weights.match(weights.find(tmp_path, section), model, section)
    materialize(model, "", {name: found.read(name) for name in found.source_names})
    theirs = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.arange(4, 14).reshape(2, 5)
    with torch.no_grad():
        assert torch.equal(model(ids)[0], theirs(ids)[0])


@pytest.mark.parametrize("model_type", UNLISTED)
def test_an_encoder_without_a_row_is_recognised(model_type: str) -> None:
    model, facts = random_model(model_type)
    assert facts.model_type == model_type
    assert len(model.get_submodule(facts.blocks)) == 2
    assert facts.smooth == ()
    assert facts.base == model.base_model_prefix
    assert len(facts.linears) >= 6


@pytest.mark.parametrize("model_type", ["gpt_neox", "phi", "bloom", "starcoder2", "olmo2"])
def test_a_decoder_without_a_row_is_recognised(model_type: str) -> None:
    config = tiny_config(model_type, num_key_value_heads=4)
    task = "text-generation"
    facts, model = find_family(config, task), build_skeleton_from_config(config, task)
    prefix = facts.prefix("text-generation")
    assert facts.kind == "decoder"
    assert facts.smooth == facts.writes == ()
    blocks = model.get_submodule(prefix + facts.blocks)
    assert sorted(list_linears(blocks[1])) == sorted(facts.linears)
    assert model.get_submodule(prefix + facts.embeddings) is model.get_input_embeddings()
    assert model.get_submodule(facts.head) is model.get_output_embeddings()
    assert model.get_submodule(prefix + facts.final_norm).weight.shape == (32,)


@pytest.mark.parametrize(
    ("model_type", "missing"),
    [
        ("mixtral", r"outside linear layers: .*experts"),
        ("mamba", r"outside linear layers: .*conv1d"),
        ("openai-gpt", r"as \(in, out\)"),
    ],
)
def test_a_decoder_that_is_not_understood_is_refused_with_what_is_missing(
    model_type: str, missing: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"{missing}.*families\.py"):
        find_family(tiny_config(model_type, num_key_value_heads=4), "text-generation")


def test_a_family_is_found_from_the_config_as_written(tmp_path: Path) -> None:
    config = tiny_config("ernie")
    assert find_family(config.to_dict(), "feature-extraction") == find_family(
        config, "feature-extraction"
    )


def test_a_model_without_one_block_list_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"no list of equal blocks.*families\.py"):
        find_family(tiny_config("xlm"), "feature-extraction")


def test_a_model_type_nobody_knows_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no architecture 'bertha'"):
        find_family({"model_type": "bertha"}, "feature-extraction")
