"""Check the fields of config.json before a model is built from them.

transformers builds a billion layers, a negative width or an unknown activation if a config asks for
them, and then fails differently for each architecture or takes all memory. Here each field has a
type and a range, and no size may exceed what the weights next to the config can hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from optimizer.foundation.errors import CheckpointError, suggest
from optimizer.load.config import rope_fields
from optimizer.model.checkpoint.checkpoint import read_header

LAYERS = 10_000  # maximum blocks; the deepest model on the hub has a few hundred
WIDTH = 10_000_000  # maximum features or heads; the widest has a few ten thousand
WORDS = 1_000_000_000  # maximum tokens in the vocabulary or in a text
LABELS = 1_000_000

# {field: largest value}, under each name that transformers' architectures use
SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "dim", "d_model", "embedding_size"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "hidden_dim", "ffn_dim"), WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"), WIDTH),
    **dict.fromkeys(("head_dim", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("vocab_size", "type_vocab_size"), WORDS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), WORDS),
    "num_labels": LABELS,
}
MAY_BE_ZERO = ("type_vocab_size", "sliding_window", "max_position_embeddings", "head_dim")
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
# sizes whose product is the number of values of one matrix
MATRICES = (
    ("vocab_size", "embedding_size"),
    ("vocab_size", "hidden_size"),
    ("vocab_size", "dim"),
    ("vocab_size", "n_embd"),
    ("type_vocab_size", "hidden_size"),
    ("intermediate_size", "hidden_size"),
    ("hidden_dim", "dim"),
    ("n_positions", "n_embd"),
)
# matrices with a row per position, in models that learn positions; rotary ones have no matrix
LEARNED = (("max_position_embeddings", "hidden_size"), ("max_position_embeddings", "dim"))
LEARN_POSITIONS = ("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "opt")
BITS = 3  # minimum bits of a weight in the formats that are read


def _size(name: str) -> tuple[Any, Any]:
    """Return (type, default) of a size field of config.json: one number, or one per layer; null:
    the architecture's."""
    number: Any = Annotated[int, Field(ge=name not in MAY_BE_ZERO, le=SIZES[name])]
    return (number | list[number] | dict[str, number] | None, None)


Epsilon = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None


class OtherFields(BaseModel):
    """Types that the fields of config.json must have, without those of sizes."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model_type: Annotated[str, Field(min_length=1)] | None = None
    architectures: list[str] | None = None
    id2label: dict[Any, Any] | None = None
    label2id: dict[Any, Any] | None = None
    auto_map: dict[str, Any] | None = None
    layer_norm_eps: Epsilon = None
    rms_norm_eps: Epsilon = None
    layer_norm_epsilon: Epsilon = None
    rope_theta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    quantization_config: dict[str, Any] | None = None
    # saves memory by splitting the sequence; values do not depend on it, and no graph supports it
    chunk_size_feed_forward: Literal[0] | None = None


MORE: dict[str, Any] = {
    **{name: _size(name) for name in SIZES},
    **dict.fromkeys(ACTIVATIONS, (str | None, None)),
}
FIELDS = create_model("FIELDS", __base__=OtherFields, **MORE)


def check(config: Mapping[str, Any], file: Path | str) -> None:
    """Raise CheckpointError naming the first field of `config`, the content of `file`, whose type
    or range is wrong."""
    try:
        FIELDS.model_validate(dict(config))
    except ValidationError as e:
        problem = e.errors()[0]
        name = str(problem["loc"][0])
        accepted = problem["msg"].removeprefix("Input should be ")
        if name in SIZES:
            accepted = f"a whole number from {int(name not in MAY_BE_ZERO)} to {SIZES[name]:,}"
        raise CheckpointError(
            f"{_shorten(problem['input'])} was found",
            where=f"{file}: {name}",
            accepted=accepted,
            fix="Correct it there, or get the file again.",
        ) from None
    for key in config.get("id2label") or {}:
        if not (str(key).isascii() and str(key).isdigit() and len(str(key)) < 10):
            raise CheckpointError(
                f"key {str(key)[:80]!r} is not the number of an output",
                where=f"{file}: id2label",
                accepted='{"0": a label, "1": another, ...}',
                fix="Number the labels in the order of the classifier's outputs.",
            )
    rope_fields.check(config, file)


def check_activations(config: Mapping[str, Any], file: Path | str) -> None:
    """Raise CheckpointError for an activation function in config.json that transformers does not
    have."""
    from transformers.activations import ACT2FN

    for name in ACTIVATIONS:
        value = config.get(name)
        if value is not None and value not in ACT2FN:
            raise CheckpointError(
                f"{value!r} is not an activation of transformers{suggest(value, list(ACT2FN))}",
                where=f"{file}: {name}",
                accepted=", ".join(sorted(ACT2FN)),
            )


def check_sizes(config: Mapping[str, Any], folder: Path, file: Path | str) -> None:
    """Raise CheckpointError for a size in config.json that the weights in `folder` are too small
    for, before anything of that size is allocated. Only safetensors files of the usual names are
    compared."""
    sharded = sorted(folder.glob("model-*.safetensors"))
    single = folder / "model.safetensors"
    used = sharded if (folder / "model.safetensors.index.json").is_file() else [single]
    entries = [e for weights in used if weights.is_file() for e in read_header(weights).values()]
    if not entries:
        return
    values = sum(entry.end - entry.begin for entry in entries) * 8 // BITS
    shared = "num_hidden_groups" in config  # ALBERT's blocks are one block, applied many times
    deep = [name for name in SIZES if SIZES[name] == LAYERS and not shared]
    layers = [name for name in deep if _has(config, name)]
    sizes = [(name,) for name, most in SIZES.items() if most == WIDTH and name in config]
    factored = any(config.get(name) for name in ("embedding_size", "word_embed_proj_dim"))
    matrices = [m for m in MATRICES if not (factored and "hidden_size" in m)]
    if config.get("model_type") in LEARN_POSITIONS:
        matrices += LEARNED
    for names in (*sizes, *matrices):
        if _has(config, *names) and prod(config[n] for n in names) > values:
            raise CheckpointError(
                f"it asks for {' x '.join(str(config[n]) for n in names)} values, and the weights "
                f"next to it hold at most {values:,}",
                where=f"{file}: {', '.join(names)}",
                fix="config.json and the weights are of different models: get both again.",
            )
    for name in layers:
        if config[name] > len(entries):
            raise CheckpointError(
                f"{config[name]} blocks, and the weights next to it are {len(entries)} tensors",
                where=f"{file}: {name}",
                fix="config.json and the weights are of different models: get both again.",
            )


def _has(config: Mapping[str, Any], *names: str) -> bool:
    return all(isinstance(config.get(name), int) for name in names)


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
