"""Arguments for transformers' GGUF reader, with the biases that it would ignore.

A file has no field for biases: llama.cpp uses whichever tensors exist, while transformers assumes
none and silently ignores tensors that its model has no place for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation.errors import CheckpointError

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
"""{field of a config: suffix of a tensor's name whose presence makes the field true}."""
FREQUENCIES = "rope_"
"""Prefix of tensors that change rotary frequencies (Llama 3.1: rope_freqs.weight); transformers
ignores them."""


def check_whole(model: nn.Module, tensors: Mapping[str, int], file: Path) -> None:
    """Raise CheckpointError unless the model and the file have equally many values. tensors: the
    file's tensors and their numbers of values."""
    stored, numbers = sum(tensors.values()), sum(p.numel() for p in model.parameters())
    if stored != numbers:
        frequencies = [name for name in tensors if name.startswith(FREQUENCIES)]
        which = f" ({', '.join(frequencies)}: rotary frequencies)" if frequencies else ""
        raise CheckpointError(
            f"its {len(tensors)} tensors have {stored:,} values, and the model that transformers "
            f"makes of them has {numbers:,}: some are ignored{which}, or are missing",
            where=str(file),
            accepted="files whose tensors transformers uses all",
            fix="Use the float checkpoint that the file was made from.",
        )


def make_arguments(name: str) -> dict[str, Any]:
    """Arguments of an Auto class's from_pretrained, besides folder and config, for the GGUF file of
    that name. GgufConfig makes transformers de-quantize even where it has kernels for integers."""
    import transformers

    options = getattr(transformers, "GgufConfig", None)
    packed = {} if options is None else {"quantization_config": options(dequantize=True)}
    return {"gguf_file": name, **packed}


def read_config(folder: Path, name: str, tensors: Collection[str]) -> Any:
    """The transformers config from the fields of the GGUF file `name`, with the fields of BIASES
    true where `tensors`, the names in the file, include such a bias."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    for field, end in BIASES.items():
        if hasattr(config, field):
            setattr(config, field, any(tensor.endswith(end) for tensor in tensors))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
