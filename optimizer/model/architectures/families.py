"""Table of facts about text architectures; image_families.py has those of images.

To add an architecture, add a row to FAMILIES.

Names are relative to the base model (`blocks`, `embeddings`) or to one block (`attention`,
`smooth`). A smooth pair names a producer whose output channels may be scaled down and the
consumers whose input channels are scaled up by the same factors, without changing the function:

 1. norm -> linears, only if nothing else reads the norm's output (pre-LN blocks);
 2. value -> attention output: attention mixes positions, never channels, so scaling a channel of
    the value scales the same channel of the output projection's input;
 3. the linear half of a gated MLP -> its output projection.

In a post-LN block the norm's output also feeds the residual, so pair 1 does not exist there. A
plain MLP has pair 3 with ReLU, which positive factors pass through, but not with GELU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.image_families import CLIP_TEXT, IMAGE_FAMILIES, SIGLIP_TEXT
from optimizer.model.architectures.linear_blocks import FeedForward, Heads, SmoothPair

_QKV = ("query", "key", "value")
_BERT_ATTENTION = tuple(f"attention.self.{n}" for n in _QKV)
_BERT = Family(
    model_type="bert",
    base="bert",
    blocks="encoder.layer",
    embeddings="embeddings",
    linears=(*_BERT_ATTENTION, "attention.output.dense", "intermediate.dense", "output.dense"),
    smooth=(SmoothPair("attention.self.value", ("attention.output.dense",)),),
    feed_forward=FeedForward(("intermediate.dense",), "output.dense"),
    depth="num_hidden_layers",
    attention_products="attention.self",
)
_ROBERTA = replace(_BERT, model_type="roberta", base="roberta", positions_after_padding=True)

_LLAMA = Family(
    model_type="llama",
    base="model",
    blocks="layers",
    embeddings="embed_tokens",
    linears=(
        *(f"self_attn.{n}_proj" for n in "qkvo"),
        *(f"mlp.{n}_proj" for n in ("gate", "up", "down")),
    ),
    smooth=(
        SmoothPair("input_layernorm", tuple(f"self_attn.{n}_proj" for n in "qkv")),
        SmoothPair("self_attn.v_proj", ("self_attn.o_proj",), grouped=True),
        SmoothPair("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        SmoothPair("mlp.up_proj", ("mlp.down_proj",)),
    ),
    kind="decoder",
    head="lm_head",
    final_norm="norm",
    writes=("self_attn.o_proj", "mlp.down_proj"),
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    feed_forward=FeedForward(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    attention=Heads(divides="hidden_size"),
    hidden="hidden_size",
    depth="num_hidden_layers",
    per_block=("layer_types", "no_rope_layers"),
)
_GPT2 = Family(
    model_type="gpt2",
    base="transformer",
    blocks="h",
    embeddings="wte",
    linears=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    smooth=(
        SmoothPair("ln_1", ("attn.c_attn",)),
        SmoothPair("attn.c_attn", ("attn.c_proj",), part=(2, 3)),
        SmoothPair("ln_2", ("mlp.c_fc",)),
    ),
    kind="decoder",
    head="lm_head",
    final_norm="ln_f",
    writes=("attn.c_proj", "mlp.c_proj"),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    feed_forward=FeedForward(("mlp.c_fc",), "mlp.c_proj", "n_inner"),
    depth="n_layer",
)
_OPT = Family(
    model_type="opt",
    base="model",
    blocks="decoder.layers",
    embeddings="decoder.embed_tokens",
    linears=(*(f"self_attn.{n}_proj" for n in ("q", "k", "v", "out")), "fc1", "fc2"),
    smooth=(
        SmoothPair("self_attn_layer_norm", tuple(f"self_attn.{n}_proj" for n in "qkv")),
        SmoothPair("self_attn.v_proj", ("self_attn.out_proj",)),
        SmoothPair("final_layer_norm", ("fc1",)),
        SmoothPair("fc1", ("fc2",)),
    ),
    kind="decoder",
    head="lm_head",
    final_norm="decoder.final_layer_norm",
    writes=("self_attn.out_proj", "fc2"),
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    position_ids=False,
    feed_forward=FeedForward(("fc1",), "fc2", "ffn_dim"),
    depth="num_hidden_layers",
)

ENCODER = "EncoderModel"  # end of the name of such a class

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        _BERT,
        _ROBERTA,
        replace(_ROBERTA, model_type="xlm-roberta"),
        replace(_ROBERTA, model_type="camembert"),
        replace(_BERT, model_type="electra", base="electra"),
        Family(
            model_type="distilbert",
            base="distilbert",
            blocks="transformer.layer",
            embeddings="embeddings",
            linears=(
                *(f"attention.{n}_lin" for n in ("q", "k", "v", "out")),
                "ffn.lin1",
                "ffn.lin2",
            ),
            smooth=(SmoothPair("attention.v_lin", ("attention.out_lin",)),),
            feed_forward=FeedForward(("ffn.lin1",), "ffn.lin2", "hidden_dim"),
            depth="n_layers",
        ),
        Family(
            model_type="mpnet",
            base="mpnet",
            blocks="encoder.layer",
            embeddings="embeddings",
            linears=(
                *(f"attention.attn.{n}" for n in "qkvo"),
                "intermediate.dense",
                "output.dense",
            ),
            smooth=(SmoothPair("attention.attn.v", ("attention.attn.o",)),),
            positions_after_padding=True,
            feed_forward=FeedForward(("intermediate.dense",), "output.dense"),
            depth="num_hidden_layers",
        ),
        Family(
            model_type="albert",
            base="albert",
            blocks="encoder.albert_layer_groups",
            embeddings="embeddings",
            linears=tuple(
                f"albert_layers.0.{n}"
                for n in (
                    *(f"attention.{m}" for m in ("query", "key", "value", "dense")),
                    "ffn",
                    "ffn_output",
                )
            ),
            smooth=(
                SmoothPair("albert_layers.0.attention.value", ("albert_layers.0.attention.dense",)),
            ),
            shared_blocks=True,
            feed_forward=FeedForward(("albert_layers.0.ffn",), "albert_layers.0.ffn_output"),
        ),
        Family(
            model_type="deberta-v2",
            base="deberta",
            blocks="encoder.layer",
            embeddings="embeddings",
            linears=(
                *(f"attention.self.{n}_proj" for n in ("query", "key", "value")),
                "attention.output.dense",
                "intermediate.dense",
                "output.dense",
            ),
            smooth=(SmoothPair("attention.self.value_proj", ("attention.output.dense",)),),
            feed_forward=FeedForward(("intermediate.dense",), "output.dense"),
            depth="num_hidden_layers",
        ),
        Family(
            model_type="modernbert",
            base="model",
            blocks="layers",
            embeddings="embeddings",
            linears=("attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
            smooth=(
                SmoothPair("attn_norm", ("attn.Wqkv",)),
                SmoothPair("mlp_norm", ("mlp.Wi",)),
                SmoothPair("attn.Wqkv", ("attn.Wo",), part=(2, 3)),
                SmoothPair("mlp.Wi", ("mlp.Wo",), part=(1, 2)),
            ),
            # no depth: only its first block has no norm before attention, so it must stay first
            feed_forward=FeedForward(("mlp.Wi",), "mlp.Wo", parts=2),
        ),
        _LLAMA,
        replace(_LLAMA, model_type="mistral", attention=Heads()),
        replace(_LLAMA, model_type="qwen2", attention=Heads()),
        replace(_LLAMA, model_type="qwen3", attention=Heads()),
        replace(_LLAMA, model_type="smollm3", attention=Heads()),
        _GPT2,
        _OPT,
        CLIP_TEXT,
        SIGLIP_TEXT,
        *IMAGE_FAMILIES,
    )
}


def sees_both_sides(config: Any) -> bool:
    """Return True for an architecture's config whose fields make a decoder's attention
    bidirectional (EmbeddingGemma)."""
    return bool(getattr(config, "use_bidirectional_attention", None)) or (
        getattr(config, "is_causal", None) is False
    )


def is_causal(config: Any) -> bool:
    """Return True for an architecture that transformers has as a decoder (causal attention), unless
    its config asks for attention in both directions."""
    if sees_both_sides(config):
        return False
    return bool(getattr(config, "is_decoder", False)) or is_language_model(config)


def is_language_model(config: Any) -> bool:
    """Return True for a decoder-only architecture: transformers has a causal language model for it,
    and no masked one. Its sequence classifier reads the last token whose id is not
    config.pad_token_id."""
    from transformers.models.auto import modeling_auto as auto

    return (
        config.model_type in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and config.model_type not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def has_encoder(model_type: object) -> bool:
    """Return True for an encoder-decoder whose encoder has a class of its own in transformers
    (T5)."""
    from transformers.models.auto import modeling_auto as auto

    name = auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.get(str(model_type), "")
    return str(name).endswith(ENCODER)
