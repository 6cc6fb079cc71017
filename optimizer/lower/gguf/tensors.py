"""Map each parameter of a checkpoint to a tensor of a GGUF file.

A quantized weight becomes blocks (blocks.py). Vectors and position tables are F32, as llama.cpp's
kernels require, and other matrices have the target's float type. A head equal to the embedding is
not written: llama.cpp uses the embedding where output.weight is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimizer.foundation.errors import OptimizeError, RecipeError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, owner_of
from optimizer.lower.compressed_tensors.tensors import (
    are_equal,
    find_embedding,
    find_head,
    find_untied_head,
    read_float_value,
)
from optimizer.lower.gguf import architectures, blocks
from optimizer.lower.gguf.blocks import Bytes
from optimizer.model.checkpoint.checkpoint import Checkpoint

FLOATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class GgufTensor:
    """Tensor of the GGUF file.

    parameter: name in the checkpoint
    name: name in the file, e.g. blk.0.attn_q.weight
    kind: type in the file, e.g. Q4_0
    shape: (out, in) or (n,)
    heads: number of heads by which rows are reordered, 0 for none
    """

    parameter: str
    name: str
    kind: str
    shape: tuple[int, ...]
    heads: int


@dataclass(frozen=True)
class GgufModel:
    """Model to write as GGUF: its checkpoint and the state of the compress stage.
    config: config.json with transformers' defaults
    float: "fp32", "fp16" or "bf16"
    """

    checkpoint: Checkpoint
    state: CompressedState
    config: Mapping[str, Any]
    float: str

    def entries(self) -> Iterator[GgufTensor]:
        """Yield the tensors of the GGUF file in the checkpoint's order.

        Raises RecipeError for a weight that no GGUF type (Q4_0, Q8_0, ...) holds, OptimizeError for
        a parameter that GGUF has no name for."""
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        architecture = architectures.find_architecture(self.config)
        number = {name: number for number, name in MODEL_ARCH_NAMES.items()}[architecture.name]
        names = get_tensor_name_map(number, architectures.block_count(self.config))
        for parameter in self._parameters():
            module, _, last = parameter.rpartition(".")
            place = names.get_name(module)
            if place is None:
                raise OptimizeError(
                    f"{parameter} has no place in a GGUF file of {architecture.name}",
                    where="lower: gguf",
                )
            rotated = module.endswith(architecture.rotated) if architecture.rotated else False
            shape = self._shape(parameter)
            kind = self._kind(parameter, place, shape)
            heads = architectures.count_heads(self.config, module) if rotated else 0
            yield GgufTensor(parameter, f"{place}.{last}", kind, shape, heads)

    def bytes_of(self, entry: GgufTensor) -> Bytes:
        """Encode one tensor for the GGUF file, uint8 (..., bytes of a row). Raises OptimizeError
        for a value that its type does not hold."""
        rows = order_rows(entry.shape[0], entry.heads)
        if entry.kind in blocks.TYPES:
            return np.ascontiguousarray(blocks.pack(self.state.weights[entry.parameter])[rows])
        stored = self.value(entry).to(DTYPES[entry.kind])
        if not bool(torch.isfinite(stored).all()):
            raise OptimizeError(
                f"{entry.parameter} has values that {entry.kind} does not hold",
                where="targets: gguf: float",
                accepted="bf16, fp32",
            )
        raw: Bytes = stored[torch.from_numpy(rows)].contiguous().view(torch.uint8).numpy()
        return raw

    def value(self, entry: GgufTensor) -> Tensor:
        """Return the values that the GGUF file holds of a parameter, float32, rows in the
        checkpoint's order."""
        if entry.kind in blocks.TYPES:
            return blocks.compute_values(self.state.weights[entry.parameter])
        value = read_float_value(self.checkpoint, self.state, entry.parameter)
        return value.float().to(DTYPES[entry.kind]).float()

    def _parameters(self) -> list[str]:
        """List the parameters to write to the GGUF file, with a head that the checkpoint ties to
        the embedding and the state changes; OptimizeError for one of the state that the checkpoint
        lacks."""
        own_head = find_untied_head(self.checkpoint, self.state)
        table = find_embedding(self.checkpoint)
        if own_head and _same(self.state.weights, own_head, table):
            own_head = ""
        names = [*self.checkpoint.tensors, *([own_head] if own_head else [])]
        head = f"{find_head(self.checkpoint)}.weight"
        unknown = sorted({*self.state.weights, *self.state.replaced} - {*names, head})
        if unknown:
            raise OptimizeError(
                f"the state holds {unknown[0]}, which the checkpoint does not have",
                where="lower: gguf",
            )
        return names

    def _shape(self, parameter: str) -> tuple[int, ...]:
        if parameter in self.checkpoint.tensors:
            return self.checkpoint.shape(parameter)
        return self.checkpoint.shape(find_embedding(self.checkpoint))

    def _kind(self, parameter: str, place: str, shape: tuple[int, ...]) -> str:
        """Choose the type that a tensor has in the GGUF file. place: name in the file without
        .weight or .bias"""
        if parameter in self.state.weights:
            try:
                return blocks.choose_type(self.state.weights[parameter])
            except ValueError as e:
                raise RecipeError(
                    f"{owner_of(parameter)} cannot be written as GGUF's blocks: {e}",
                    where="targets: gguf",
                    accepted=f"rows and groups of whole blocks of {blocks.BLOCK}; 8 bits "
                    "symmetric; 4 bits; scales that fp16 holds",
                    fix="Name it in quantize.keep_float, or remove the target gguf.",
                ) from None
        alone = len(shape) == 1 or place == "position_embd"
        return "F32" if alone else FLOATS[self.float]


def order_rows(rows: int, heads: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the index of the checkpoint's row for each row of the GGUF file, int64 (rows,).

    heads: number of heads whose rows are reordered; 0 keeps the order
    transformers rotates feature i of a head with i + half; llama.cpp's llama graph rotates
    neighbours.
    """
    order = np.arange(rows)
    if not heads:
        return order
    return order.reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).reshape(rows)


def _same(weights: Mapping[str, QTensor], one: str, other: str) -> bool:
    """Return True where two parameters are quantized with equal schemes, integers and scales. Those
    of tied parameters must be equal, because a GGUF file holds them once."""
    a, b = weights.get(one), weights.get(other)
    return a is not None and b is not None and a.scheme == b.scheme and are_equal(a, b)
