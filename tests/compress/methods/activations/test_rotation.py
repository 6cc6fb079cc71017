"""A rotated model is the same function."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from optimizer.compress.methods.activations.hadamard import make_orthogonal
from optimizer.compress.methods.activations.rotation import Role, Rotated
from tests.conftest import heavy_tailed

LAYERS = 2


def tiny(tied: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=tied,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(heavy_tailed(tuple(parameter.shape), i, 0.3))
    return model


def roles(tied: bool) -> dict[str, Role]:
    made = {
        "model.embed_tokens.weight": Role(reads=True),
        "model.norm.weight": Role(ones=True),
        "lm_head.weight": Role(
            reads=True,
            gain="model.norm.weight",
            source="model.embed_tokens.weight" if tied else "",
        ),
    }
    for i in range(LAYERS):
        block = f"model.layers.{i}"
        before, after = (
            f"{block}.input_layernorm.weight",
            f"{block}.post_attention_layernorm.weight",
        )
        made |= {before: Role(ones=True), after: Role(ones=True)}
        made |= {f"{block}.self_attn.{n}_proj.weight": Role(True, gain=before) for n in "qk"}
        made |= {f"{block}.mlp.{n}_proj.weight": Role(True, gain=after) for n in ("gate", "up")}
        made |= {
            f"{block}.self_attn.v_proj.weight": Role(True, gain=before, heads_out=True),
            f"{block}.self_attn.v_proj.bias": Role(heads_out=True),
            f"{block}.self_attn.o_proj.weight": Role(writes=True, heads_in=True),
            f"{block}.self_attn.o_proj.bias": Role(writes=True),
            f"{block}.mlp.down_proj.weight": Role(writes=True),
        }
    return made


def logits(tensors: Mapping[str, Tensor]) -> Tensor:
    model = tiny(tied=False)
    model.load_state_dict(dict(tensors))
    with torch.no_grad():
        out: Tensor = model(torch.arange(40).reshape(2, 20)).logits
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("which", ["residual", "head", "both"])
def test_a_rotated_model_gives_the_same_logits(tied: bool, which: str) -> None:
    state = tiny(tied).state_dict()
    checkpoint = {n: t for n, t in state.items() if not (tied and n == "lm_head.weight")}
    residual = make_orthogonal(48, 1) if which != "head" else None
    head = make_orthogonal(8, 2) if which != "residual" else None
    view = dict(Rotated(checkpoint, roles(tied), residual, head))
    if tied and residual is None:
        assert "lm_head.weight" not in view
        view["lm_head.weight"] = view["model.embed_tokens.weight"]
    before, after = logits(state), logits(view)
    assert torch.allclose(before, after, atol=1e-4 * float(before.abs().max()))


def test_rotation_changes_every_linear_and_empties_the_norms() -> None:
    checkpoint = tiny(tied=False).state_dict()
    view = Rotated(checkpoint, roles(False), make_orthogonal(48, 1), make_orthogonal(8, 2))
    for name in checkpoint:
        if "norm" in name:
            assert torch.equal(view[name], torch.ones(48))
        elif "weight" in name:
            assert not torch.allclose(view[name], checkpoint[name], atol=1e-3), name


def test_rotation_lowers_the_largest_magnitude_of_an_outlier_feature() -> None:
    embedding = heavy_tailed((50, 48), 1)
    embedding[:, 5] *= 50
    view = Rotated({"e": embedding}, {"e": Role(reads=True)}, make_orthogonal(48, 0), None)
    assert float(view["e"].abs().max()) < 0.5 * float(embedding.abs().max())
