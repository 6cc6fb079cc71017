"""Quantize a decoder's head and embedding, which lie outside the blocks.

The embedding is rounded to nearest. The head is rounded by the recipe's method on its inputs after
every block was quantized; gptq reduces the cost of 4 bits tenfold (docs/decisions/0023). A
vocabulary is large, so the head is rounded by independent slices of rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.rounding import FloatWeight, prune_and_round
from optimizer.compress.methods.weights.rtn import relative_error
from optimizer.compress.module_rows import Row, label, significant
from optimizer.compress.selection import Selection
from optimizer.compress.walk.blocks import Stream
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import QTensor, stack
from optimizer.foundation.state import CompressedState, Note
from optimizer.model.checkpoint.model import materialize, release
from optimizer.recipe.compression.methods import NEAREST
from optimizer.recipe.compression.quantize import Quantize

ROWS = 8192  # rows of the vocabulary rounded together


def write_moments(source: ModelSource, stream: Stream, file: Path) -> None:
    """Write H (features, features), the sum of x^T x over the inputs of the head.

    stream: hidden states after the last block

    Raises CheckpointError where more than a norm lies between the last block and the head.
    """
    from safetensors.torch import save_file

    model, norm, head = source.model, source.final_norm, source.family.head
    if norm:
        materialize(model, norm, source.tensors)
    reads = cast(nn.Linear, model.get_submodule(head)).in_features
    moments: Tensor | None = None
    with torch.no_grad():
        for hidden, real in zip(stream.hidden, stream.real, strict=True):
            x = hidden[real]
            x = model.get_submodule(norm)(x) if norm else x
            if x.shape[1] != reads:
                raise CheckpointError(
                    f"reads {reads} features and the last block outputs {x.shape[1]}; the layers "
                    "between them are unknown, so gptq cannot measure the head's inputs",
                    where=head,
                    fix="Leave it in float (quantize.head), or round it with method: rtn.",
                )
            with stream.sums():
                part = (x.T @ x).double()
            moments = part if moments is None else moments.add_(part)
    if norm:
        release(model, norm)
    assert moments is not None
    save_file({"moments": moments.float()}, file.with_suffix(".partial"))
    file.with_suffix(".partial").rename(file)


def compress(
    source: ModelSource,
    quantize: Quantize,
    selection: Selection,
    moments: Path,
    at_once: int = ROWS,
) -> tuple[CompressedState, list[Row]]:
    """Quantize a decoder's head and embedding (selection.outside); returns (state, report rows).

    moments: file of `write_moments`; the head is rounded to nearest where the file is missing
    at_once: rows rounded together
    """
    from safetensors.torch import load_file

    tensors, tied = source.tensors, f"{source.embedding}.weight"
    weights: dict[str, QTensor] = {}
    rows, notes = [], []
    mode = quantize.activations.granularity if quantize.activations else None
    for name, scheme in selection.outside.items():
        parameter = f"{name}.weight"
        weight = FloatWeight(name, tensors[parameter if parameter in tensors else tied], scheme)
        if name == source.family.head and moments.exists():
            weight = replace(weight, second_moments=load_file(moments)["moments"])
        weights[parameter], row = _one(weight, quantize, at_once)
        rows.append(row)
        if mode is not None:
            notes.append(Note(name, "weight-only", "outside the blocks the input stays float"))
    return CompressedState(weights, activations=mode, notes=tuple(notes)), rows


def by_moments(quantize: Quantize, selection: Selection, head: str) -> bool:
    """True where the head is quantized by a method that reads H of its inputs, and is not tied."""
    if quantize.head == "tied":
        return False
    return head in selection.outside and quantize.rounding.second_moments


def _one(weight: FloatWeight, quantize: Quantize, at_once: int) -> tuple[QTensor, Row]:
    method = NEAREST if weight.second_moments is None else quantize.rounding
    size = len(weight.values) if weight.scheme.granularity == "tensor" else at_once
    parts, errors, remark = [], [], ""
    for rows in weight.values.split(size):
        values = rows if weight.second_moments is None else rows.float()
        q, remark = prune_and_round(replace(weight, values=values), method, quantize)
        parts.append(q)
        errors.append((relative_error(rows, q.dequantize()), float(rows.float().square().sum())))
    total = sum(size for _, size in errors)
    error = (sum(e * e * size for e, size in errors) / total) ** 0.5 if total else 0.0
    row = Row(weight.name, label(weight.scheme, None), significant(error), note=remark)
    return stack(parts), row
