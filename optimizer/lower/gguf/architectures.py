"""Table of llama.cpp's architectures: names, metadata keys, assumptions and row order.

Sources: gguf.constants (names of keys); src/models of llama.cpp (keys that a graph reads, and its
assumptions); conversion/ of llama.cpp (order of rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.lower.gguf.blocks import BLOCK

Value = int | float


@dataclass(frozen=True)
class GgufArchitecture:
    """One model_type of transformers in llama.cpp's terms.

    name: general.architecture
    fields: {key below the name: field of the config}; absent and null fields are not written
    assumed: {field: values with which llama.cpp's graph computes the same function}
    rotated: linears whose row pairs (i, i + half) of a head lie side by side in the file
    window: field of a sliding window, which llama.cpp's graph does not apply
    """

    name: str
    fields: Mapping[str, str]
    assumed: Mapping[str, tuple[Any, ...]]
    rotated: tuple[str, ...] = ()
    positions: str = "max_position_embeddings"
    width: str = "hidden_size"
    inner: str = "intermediate_size"
    window: str = ""
    rotary: bool = True


_LLAMA = GgufArchitecture(
    name="llama",
    fields={
        "vocab_size": "vocab_size",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    },
    assumed={"hidden_act": ("silu", "swish")},
    rotated=("self_attn.q_proj", "self_attn.k_proj"),
)
_QWEN2 = replace(_LLAMA, name="qwen2", rotated=(), window="sliding_window")

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, window="sliding_window"),
    "qwen2": _QWEN2,
    "qwen3": replace(_QWEN2, name="qwen3", assumed={**_QWEN2.assumed, "attention_bias": (False,)}),
    "gpt2": GgufArchitecture(
        name="gpt2",
        fields={
            "vocab_size": "vocab_size",
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        assumed={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
        positions="n_positions",
        width="n_embd",
        inner="n_inner",
        rotary=False,
    ),
}
"""{model_type: its record}"""


def find_architecture(config: Mapping[str, Any]) -> GgufArchitecture:
    """Look up how llama.cpp describes a model's architecture.

    config: config.json with transformers' defaults
    Raises RecipeError for a model_type that is not in the table, and for a field that llama.cpp's
    graph computes differently.
    """
    model_type = str(config.get("model_type"))
    if model_type not in ARCHITECTURES:
        raise RecipeError(
            f"architecture {model_type!r} is not written as GGUF",
            where="targets: gguf",
            accepted=", ".join(ARCHITECTURES),
            fix="Remove the target gguf.",
        )
    architecture = ARCHITECTURES[model_type]
    for name, accepted in architecture.assumed.items():
        if name in config and config[name] not in accepted:
            raise _not_computed(model_type, name, config[name], accepted)
    kind = _rope(config).get("rope_type", "default")
    if architecture.rotary and kind != "default":
        raise _not_computed(model_type, "rope_parameters.rope_type", kind, ("default",))
    return architecture


def check(config: Mapping[str, Any], at: str, *_: object) -> None:
    """Refuse a recipe's gguf target: raise RecipeError as find_architecture does, and for rows that
    are not whole blocks.
    at: path of the target in the recipe
    """
    architecture = find_architecture(config)
    for name in (architecture.width, architecture.inner):
        width = config.get(name)
        if isinstance(width, int) and width % BLOCK:
            raise RecipeError(
                f"the model's {name} is {width}, and GGUF's blocks have {BLOCK} values: the "
                f"weights that read it cannot be quantized ({at})",
                where="model.source",
                accepted=f"multiples of {BLOCK}",
                fix="Use another target, e.g. onnxruntime.",
            )


def build_metadata(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return {key: value} from which llama.cpp builds the graph; raises as find_architecture."""
    architecture = find_architecture(config)
    present = {key: config.get(name) for key, name in architecture.fields.items()}
    numbers = {key: value for key, value in present.items() if value is not None}
    if architecture.inner == "n_inner" and config.get("n_inner") is None:
        numbers["feed_forward_length"] = 4 * config["n_embd"]
    if architecture.rotary:
        size = get_head_size(config)
        numbers |= {
            "attention.key_length": size,
            "attention.value_length": size,
            "rope.dimension_count": size,
            "rope.freq_base": float(_rope(config)["rope_theta"]),
        }
    numbers["context_length"] = limit_context(config)
    return {f"{architecture.name}.{key}": value for key, value in numbers.items()}


def block_count(config: Mapping[str, Any]) -> int:
    return int(config[find_architecture(config).fields["block_count"]])


def get_head_size(config: Mapping[str, Any]) -> int:
    """Return for llama.cpp the width of a head, in values, of a model with rotary positions."""
    size = config.get("head_dim")
    return int(size or config["hidden_size"] // config["num_attention_heads"])


def count_heads(config: Mapping[str, Any], module: str) -> int:
    """Count the heads in the rows of a rotated linear: key-value heads for keys."""
    keys = module.endswith("k_proj")
    count = config.get("num_key_value_heads") if keys else None
    return int(count or config["num_attention_heads"])


def limit_context(config: Mapping[str, Any]) -> int:
    """Return the maximum tokens for which llama.cpp computes the same function: the number of
    positions, or the sliding window if that is shorter."""
    architecture = ARCHITECTURES[str(config["model_type"])]
    positions = int(config[architecture.positions])
    window = get_sliding_window(config)
    return min(positions, window) if window else positions


def get_sliding_window(config: Mapping[str, Any]) -> int:
    """Return for llama.cpp the tokens of the sliding window; 0 for none."""
    architecture = ARCHITECTURES[str(config["model_type"])]
    if not architecture.window or config.get("use_sliding_window") is False:
        return 0
    return int(config.get(architecture.window) or 0)


def write_notes(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the model's architecture for users of the GGUF file."""
    window, positions = get_sliding_window(config), config.get("max_position_embeddings", 0)
    if window and window < positions:
        yield (
            f"llama.cpp's graph does not apply the model's sliding window of {window} tokens, so "
            f"the file has a context of {window}, not {positions}"
        )


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    return rope


def _not_computed(model_type: str, name: str, value: Any, accepted: tuple[Any, ...]) -> RecipeError:
    return RecipeError(
        f"the model's config has {name}: {value}, which llama.cpp's graph of {model_type} does not "
        "compute",
        where="targets: gguf",
        accepted=", ".join(str(a).lower() for a in accepted),
        fix="Remove the target gguf for this model.",
    )
