"""A decoder's head and embedding, which lie outside the blocks.

The embedding is rounded to nearest: it is looked up. The head is rounded as the recipe's rounder
does it, on what reaches it after every block was quantized: gptq, where that is asked for, makes
its 4 bits cost a tenth of what nearest ones do (SmolLM2, groups of 64: 0.028 nats against 0.234).
A vocabulary is large, so the head's rows are taken some at a time; they do not see each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.apply import rounding
from optimizer.compress.methods.rtn import relative_error
from optimizer.compress.segment import Row, label, rounded
from optimizer.compress.selection import Selection
from optimizer.compress.walk import blocks as walk
from optimizer.errors import CheckpointError
from optimizer.load.families import Family
from optimizer.load.model import materialize, release
from optimizer.qtensor import QTensor, Scheme, stacked
from optimizer.recipe.quantize import Quantize
from optimizer.state import CompressedState, Note

ROWS = 8192  # of the vocabulary at once


def keep_moments(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    facts: Family,
    prefix: str,
    stream: walk.Stream,
    file: Path,
) -> None:
    """Write sum x^T x (features, features) over the inputs of the head. stream: after the last
    block; model: a skeleton, left as one. Raises CheckpointError where more than a norm lies
    between the two."""
    from safetensors.torch import save_file

    norm = f"{prefix}{facts.final_norm}" if facts.final_norm else None
    if norm is not None:
        materialize(model, norm, tensors)
    reads = cast(nn.Linear, model.get_submodule(facts.head)).in_features
    moments: Tensor | None = None
    with torch.no_grad():
        for hidden, real in zip(stream.hidden, stream.real, strict=True):
            x = hidden[real]
            x = x if norm is None else model.get_submodule(norm)(x)
            if x.shape[1] != reads:
                raise CheckpointError(
                    f"reads {reads} features and the last block gives {x.shape[1]}: what lies "
                    "between is not known, so gptq cannot see the head's inputs",
                    where=facts.head,
                    fix="Leave it in float (quantize.head), or round it with method: rtn.",
                )
            with stream.sums():
                part = (x.T @ x).double()
            moments = part if moments is None else moments.add_(part)
    if norm is not None:
        release(model, norm)
    assert moments is not None
    save_file({"moments": moments.float()}, file.with_suffix(".partial"))
    file.with_suffix(".partial").rename(file)


def compress(
    tensors: Mapping[str, Tensor],
    facts: Family,
    embedding: str,
    quantize: Quantize,
    selection: Selection,
    moments: Path,
    at_once: int = ROWS,
) -> tuple[CompressedState, list[Row]]:
    """A tied head has the values of `embedding`. moments: what `keep_moments` wrote, where the
    rounder needs it; at_once: rows."""
    from safetensors.torch import load_file

    weights: dict[str, QTensor] = {}
    rows, notes = [], []
    mode = quantize.activations.granularity if quantize.activations else None
    for name, scheme in selection.outside.items():
        parameter = f"{name}.weight"
        weight = tensors[parameter if parameter in tensors else embedding]
        hessian = None
        if name == facts.head and moments.exists():
            hessian = load_file(moments)["moments"]
        weights[parameter], row = _one(name, weight, scheme, hessian, quantize, at_once)
        rows.append(row)
        if mode is not None:
            notes.append(Note(name, "weight-only", "outside the blocks the input stays float"))
    return CompressedState(weights, activations=mode, notes=tuple(notes)), rows


def by_moments(quantize: Quantize, selection: Selection, facts: Family) -> bool:
    """Whether the head is rounded by what reaches it."""
    return facts.head in selection.outside and "gptq" in quantize.rounders


def _one(
    name: str,
    weight: Tensor,
    scheme: Scheme,
    hessian: Tensor | None,
    quantize: Quantize,
    at_once: int,
) -> tuple[QTensor, Row]:
    size = len(weight) if scheme.granularity == "tensor" else at_once
    parts, errors, said = [], [], ""
    for rows in weight.split(size):
        if hessian is None:
            q = rounding.nearest_one(name, rows, scheme)
        else:
            q, said = rounding.coded(name, rows.float(), hessian, None, scheme, quantize)
        parts.append(q)
        errors.append((relative_error(rows, q.dequantize()), float(rows.float().square().sum())))
    total = sum(size for _, size in errors)
    error = (sum(e * e * size for e, size in errors) / total) ** 0.5 if total else 0.0
    return stacked(parts), Row(name, label(scheme, None), weight_error=rounded(error), note=said)
