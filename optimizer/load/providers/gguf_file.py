"""How transformers reads a GGUF file here, and the biases that it would leave out.

A file has no field for biases: llama.cpp goes by the tensors that it has, transformers by a config
that says there are none, and of tensors that have no place in its model it says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation.errors import CheckpointError

BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
"""A config's field, of those that have it: the end of a tensor's name that says it is true."""
FREQUENCIES = "rope_"
"""How the names of tensors begin that change rotary frequencies (Llama 3.1: rope_freqs.weight), of
which transformers makes nothing."""


def sizes(opened: Any) -> dict[str, int]:
    """{tensor: how many numbers} of a gguf.GGUFReader."""
    return {t.name: int(t.n_elements) for t in opened.tensors}


def check_whole(model: nn.Module, tensors: Mapping[str, int], file: Path) -> None:
    """Raise CheckpointError unless the model has as many numbers as the file's tensors: their
    `sizes`."""
    stored, numbers = sum(tensors.values()), sum(p.numel() for p in model.parameters())
    if stored != numbers:
        frequencies = [name for name in tensors if name.startswith(FREQUENCIES)]
        which = f" ({', '.join(frequencies)}: frequencies of positions)" if frequencies else ""
        raise CheckpointError(
            f"its {len(tensors)} tensors have {stored:,} numbers, and the model that transformers "
            f"makes of them has {numbers:,}: some find no place{which}, or are missing",
            where=str(file),
            accepted="files of which transformers takes every tensor",
            fix="Use the float checkpoint that the file was made from.",
        )


def arguments(name: str) -> dict[str, Any]:
    """What an Auto class's from_pretrained takes besides the folder and the config, of a model in
    the GGUF file of that name.

    transformers would leave the weights of some architectures in the file's blocks where it has
    kernels for them (GgufConfig); here they are always de-quantized.
    """
    import transformers

    options = getattr(transformers, "GgufConfig", None)
    packed = {} if options is None else {"quantization_config": options(dequantize=True)}
    return {"gguf_file": name, **packed}


def config_of(folder: Path, name: str, tensors: Collection[str]) -> Any:
    """The transformers config that the file's fields say, with the biases that its tensors, whose
    names these are, have."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, gguf_file=name)
    for field, end in BIASES.items():
        if hasattr(config, field):
            setattr(config, field, any(tensor.endswith(end) for tensor in tensors))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config
