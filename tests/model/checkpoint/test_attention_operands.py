"""An encoder's attention whose operands pass through modules is transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.operands import HOLDER, OPERANDS
from optimizer.model.checkpoint.cache_operands import install_operands
from optimizer.model.checkpoint.model import copy_module

WITH_PRODUCTS = [name for name, family in FAMILIES.items() if family.attention_products]
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 0, 0]])
MASK = (TOKENS != 0).long()


def tiny(model_type: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=32,
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    return AutoModel.from_config(config, attn_implementation="eager").eval()


def operands(model_type: str) -> list[str]:
    family = FAMILIES[model_type]
    attention = f"{family.blocks}.1.{family.attention_products}"
    return [f"{attention}.{HOLDER}.{name}" for name in OPERANDS]


@pytest.mark.parametrize("model_type", WITH_PRODUCTS)
def test_every_attention_that_says_so_multiplies_its_operands(model_type: str) -> None:
    model, names = tiny(model_type), operands(model_type)
    everywhere = [n.replace(".1.", f".{i}.") for i in (0, 1) for n in names]
    twin = copy_module(model)
    install_operands(twin, everywhere)
    seen: dict[str, torch.Size] = {}

    def watch(name: str) -> None:
        def keep(_: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
            seen[name.rpartition(".")[2]] = args[0].shape

        twin.get_submodule(name).register_forward_pre_hook(keep)

    for name in names:
        watch(name)
    inputs = {"input_ids": TOKENS, "attention_mask": MASK}
    with torch.no_grad():
        own, other = model(**inputs)[0], twin(**inputs)[0]
    assert torch.allclose(own[MASK > 0], other[MASK > 0], atol=1e-6)
    assert seen == dict.fromkeys(OPERANDS[:3], (2, 5, 16)) | {"probabilities": (2, 4, 5, 5)}


def test_the_model_itself_keeps_its_attention() -> None:
    model = tiny("bert")
    install_operands(copy_module(model), operands("bert"))
    assert model.config._attn_implementation == "eager"
    assert not any(HOLDER in name for name, _ in model.named_modules())
