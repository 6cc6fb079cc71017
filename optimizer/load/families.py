"""Facts about architectures, as data. To add one, add a row to FAMILIES.

Names are relative to the base model (`blocks`, `embeddings`) or to one block (`attention`,
`smooth`). A smooth pair names a producer whose output channels may be scaled down and the
consumers whose input channels are scaled up by the same factors, without changing the function:

 1. norm -> linears, only where nothing else reads the norm's output (pre-LN blocks);
 2. value -> attention output: attention mixes positions, never channels, so scaling a channel of
    the value scales the same channel of the output projection's input;
 3. the linear half of a gated MLP -> its output projection.

In a post-LN block the norm's output also feeds the residual, so pair 1 does not exist there, and
through GELU pair 3 does not exist for a plain MLP (through ReLU it does: positive factors pass).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from optimizer.errors import CheckpointError
from optimizer.recipe import Task

OUTSIDE = 3  # linear layers an encoder may have outside its blocks: projections of the embedding
GENERIC_FIX = "Add a row for this model_type to optimizer/load/families.py."


@dataclass(frozen=True)
class SmoothPair:
    """producer and consumers, relative to a block.

    part: (i, n) when only the i-th of n equal slices of the producer's rows feeds the consumers
    (a fused query/key/value or gate/up projection). grouped: the producer makes values for
    key/value heads, each read by several query heads, so the consumers' factors repeat by head.
    """

    producer: str
    consumers: tuple[str, ...]
    part: tuple[int, int] = (0, 1)
    grouped: bool = False


@dataclass(frozen=True)
class Family:
    """One architecture.

    base: the attribute that holds the base model in a model with a head. linears: those that
    every block has (options of a config can add some, such as DeBERTa's own position projections
    when share_att_key is off).
    """

    model_type: str
    base: str
    blocks: str
    embeddings: str
    linears: tuple[str, ...]
    smooth: tuple[SmoothPair, ...]
    pre_norm: bool = False
    shared_blocks: bool = False  # one block is applied several times: walk it once, all calls in
    positions_after_padding: bool = False  # position ids start at pad_token_id + 1
    kind: Literal["encoder", "decoder"] = "encoder"
    head: str = ""
    final_norm: str = ""
    writes: tuple[str, ...] = ()
    value: str = ""
    output: str = ""
    position_ids: bool = True
    transposed: tuple[str, ...] = ()

    @property
    def base_prefix(self) -> str:
        """ "bert.": what names in a model with a head start with."""
        return f"{self.base}."

    def prefix(self, task: Task) -> str:
        """What the base model's names start with in the model of this task: "" or "bert."."""
        return "" if task in ("sentence-embedding", "feature-extraction") else self.base_prefix


_BERT_ATTENTION = tuple(f"attention.self.{n}" for n in ("query", "key", "value"))
_BERT = Family(
    model_type="bert",
    base="bert",
    blocks="encoder.layer",
    embeddings="embeddings",
    linears=(*_BERT_ATTENTION, "attention.output.dense", "intermediate.dense", "output.dense"),
    smooth=(SmoothPair("attention.self.value", ("attention.output.dense",)),),
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
    pre_norm=True,
    kind="decoder",
    head="lm_head",
    final_norm="norm",
    writes=("self_attn.o_proj", "mlp.down_proj"),
    value="self_attn.v_proj",
    output="self_attn.o_proj",
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
    pre_norm=True,
    kind="decoder",
    head="lm_head",
    final_norm="ln_f",
    writes=("attn.c_proj", "mlp.c_proj"),
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
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
    pre_norm=True,
    kind="decoder",
    head="lm_head",
    final_norm="decoder.final_layer_norm",
    writes=("self_attn.out_proj", "fc2"),
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    position_ids=False,
)

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
            pre_norm=True,
        ),
        _LLAMA,
        replace(_LLAMA, model_type="mistral"),
        replace(_LLAMA, model_type="qwen2"),
        replace(_LLAMA, model_type="qwen3"),
        replace(_LLAMA, model_type="smollm3"),
        _GPT2,
        _OPT,
    )
}


def family(config: Any) -> Family:
    """The facts of a config (a transformers config, or the dict of config.json).

    An architecture without a row is understood when its base model has one list of equal blocks
    that holds all but a few of its linear layers; it then has no smooth pairs. Raises
    CheckpointError saying what is missing otherwise.
    """
    fields = config if isinstance(config, Mapping) else config.to_dict()
    model_type = str(fields.get("model_type") or "")
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    return _recognised(model_type, config)


def _recognised(model_type: str, config: Any) -> Family:
    """A family read off the skeleton of the base model."""
    from optimizer.load.model import skeleton_from_config

    if isinstance(config, Mapping):
        from transformers import AutoConfig

        fields = {k: v for k, v in config.items() if k != "model_type"}
        try:
            config = AutoConfig.for_model(model_type, **fields)
        except ValueError as e:
            raise CheckpointError(
                f"transformers knows no architecture {model_type!r}",
                where="config.json: model_type",
                accepted=f"one of {', '.join(sorted(FAMILIES))}, or another encoder of "
                "transformers with one list of equal blocks",
            ) from e
    model: Any = skeleton_from_config(config, "feature-extraction")
    blocks = block_list(model, model_type)
    embeddings = next(
        (
            path.split(".")[0]
            for path, module in model.named_modules()
            if isinstance(module, nn.Embedding)
        ),
        "",
    )
    first = model.get_submodule(blocks)[0]
    return Family(
        model_type=model_type,
        base=str(model.base_model_prefix),
        blocks=blocks,
        embeddings=embeddings,
        linears=linear_names(first),
        smooth=(),
        positions_after_padding=any(
            isinstance(m, nn.Embedding) and "position" in path and m.padding_idx is not None
            for path, m in model.named_modules()
        ),
    )


def linear_names(block: nn.Module) -> tuple[str, ...]:
    """The linear layers of a block, relative to it, in the order they were made."""
    return tuple(path for path, m in block.named_modules() if isinstance(m, nn.Linear))


def block_list(model: nn.Module, model_type: str) -> str:
    """The name of the outermost ModuleList whose equal blocks hold all but a few linear layers.

    Raises CheckpointError when there is none.
    """
    total = len(linear_names(model))
    lists: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        outside = total - len(linear_names(module))
        if len({type(m) for m in module}) == 1 and 0 <= outside <= OUTSIDE < total:
            lists.append(path)
    if not lists:
        raise CheckpointError(
            f"architecture {model_type!r} is not covered: it has no list of equal blocks that "
            f"holds all but {OUTSIDE} of its linear layers",
            where="config.json: model_type",
            accepted=", ".join(sorted(FAMILIES)),
            fix=GENERIC_FIX,
        )
    return lists[0]  # the outermost: named_modules walks from the root
