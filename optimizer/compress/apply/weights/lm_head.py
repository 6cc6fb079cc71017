"""Quantize a decoder's head and embedding, which lie outside the blocks.

The embedding is rounded to nearest. The head is rounded by the recipe's method on its inputs after
every block was quantized; gptq reduces the cost of 4 bits tenfold (docs/decisions/0023). A
vocabulary is large, so both are read and rounded by independent slices of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.rounding import FloatWeight, prune_and_round
from optimizer.compress.methods.weights.rtn import measure_relative_error
from optimizer.compress.module_rows import ModuleRow, label, round_significant
from optimizer.compress.selection import Selection
from optimizer.compress.walk.blocks import CalibrationStream
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process import threads
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.qtensor import QTensor, Scheme, stack
from optimizer.foundation.state import CompressedState, Note
from optimizer.recipe.compression.methods import NEAREST
from optimizer.recipe.compression.quantize import Quantize

ROWS = 8192  # rows of the vocabulary rounded together by H, whose factorization they share
NEAREST_ROWS = 1024  # rows rounded together to nearest


class _HeadMoments:
    """Running sum H (features, features) = x^T x over the inputs of the output head, which a method
    such as GPTQ reads."""

    def __init__(self, features: int, device: torch.device) -> None:
        self.sum = torch.zeros(features, features, dtype=torch.float64, device=device)

    def merge(self, later: _HeadMoments) -> None:
        self.sum += later.sum


def write_moments(source: ModelSource, stream: CalibrationStream, file: Path) -> None:
    """Write H (features, features), the sum of x^T x over the inputs of the head. Of several
    processes, which call this together, the first writes.

    stream: hidden states after the last block

    Raises CheckpointError where more than a norm lies between the last block and the head.
    """
    from safetensors.torch import save_file

    model, norm, head = source.model, source.final_norm, source.family.head
    if norm:
        source.fill(norm)
    reads = cast(nn.Linear, model.get_submodule(head)).in_features

    def measure(sums: Mapping[str, _HeadMoments], part: range) -> None:
        for i in range(len(stream.hidden))[part.start : part.stop]:
            x = stream.hidden[i].to(source.device)[stream.real[i].to(source.device)]
            x = model.get_submodule(norm)(x) if norm else x
            if x.shape[1] != reads:
                raise CheckpointError(
                    f"reads {reads} features and the last block outputs {x.shape[1]}; the layers "
                    "between them are unknown, so gptq cannot measure the head's inputs",
                    where=head,
                    fix="Leave it in float (quantize.head), or round it with method: rtn.",
                )
            with stream.sums():
                sums[head].sum += (x.T @ x).double()

    with torch.no_grad():
        sums = stream.deal.sum(lambda: {head: _HeadMoments(reads, source.device)}, measure)
    if norm:
        source.empty(norm)
    if stream.deal.processes.first:
        save_file({"moments": sums[head].sum.float().cpu()}, file.with_suffix(".partial"))
        file.with_suffix(".partial").rename(file)


def compress(
    source: ModelSource,
    quantize: Quantize,
    selection: Selection,
    moments: Path,
    at_once: int = ROWS,
) -> tuple[CompressedState, list[ModuleRow]]:
    """Quantize a decoder's head and embedding (selection.outside); returns (state, report rows).

    moments: file of `write_moments`; the head is rounded to nearest where the file is missing
    at_once: rows rounded together
    """
    from safetensors.torch import load_file

    weights: dict[str, QTensor] = {}
    rows, notes = [], []
    mode = quantize.activations.mode if quantize.activations else None
    nearest: dict[tuple[str, Scheme], _RoundedHead] = {}  # a tied table is rounded once
    for name, scheme in selection.outside.items():
        own, tied = f"{name}.weight", f"{source.embedding}.weight"
        table = own if own in {*source.tensors} else tied
        if name == source.family.head and moments.exists():
            H = load_file(moments)["moments"].to(source.device)
            rounded = _round(source, (name, table), scheme, quantize, at_once, H)
        else:
            if (table, scheme) not in nearest:
                nearest[table, scheme] = _round(source, (name, table), scheme, quantize, at_once)
            rounded = nearest[table, scheme]
        weights[own] = rounded.q
        rows.append(
            ModuleRow(
                name, label(scheme, None), round_significant(rounded.error), note=rounded.remark
            )
        )
        if mode is not None:
            notes.append(Note(name, "weight-only", "outside the blocks the input stays float"))
    return CompressedState(weights, activations=mode, notes=tuple(notes)), rows


def needs_hessian(quantize: Quantize, selection: Selection, head: str) -> bool:
    """Return True where the head is quantized by a method that reads H of its inputs, and is not
    tied."""
    if quantize.head == "tied":
        return False
    return head in selection.outside and quantize.rounding.second_moments


@dataclass(frozen=True)
class _RoundedHead:
    """The quantized head or embedding: integers, the relative error of their values, and the
    method's note."""

    q: QTensor
    error: float
    remark: str


def _round(
    source: ModelSource,
    named: tuple[str, str],
    scheme: Scheme,
    quantize: Quantize,
    at_once: int,
    H: Tensor | None = None,
) -> _RoundedHead:
    """Round the table of the head or of the embedding, by the recipe's method where H is given,
    else to nearest."""
    (name, table), tensors = named, cast(Any, source.tensors)  # with rows
    method = NEAREST if H is None else quantize.rounding
    count = len(cast(Tensor, source.model.get_submodule(name).weight))
    size = at_once if H is not None else min(at_once, NEAREST_ROWS)
    size = count if scheme.granularity == "tensor" else size
    measured: list[tuple[str, float, float]] = []

    def one(start: int) -> tuple[QTensor, str, float, float]:
        values = tensors.rows(table, torch.arange(start, min(start + size, count)))
        values = values.to(source.device)
        q, remark = prune_and_round(FloatWeight(name, values, scheme, H), method, quantize)
        error = measure_relative_error(values, q.dequantize())
        return q.to(CPU), remark, error, float(values.square().sum())

    def parts() -> Iterator[QTensor]:
        starts = range(0, count, size)
        alone = H is None and source.device == CPU
        for q, *error in threads.map_in_threads(one, starts) if alone else map(one, starts):
            measured.append(cast(Any, error))
            yield q

    q = stack(parts(), count)
    total = sum(square for *_, square in measured)
    squares = sum(error * error * square for _, error, square in measured)
    return _RoundedHead(q, (squares / total) ** 0.5 if total else 0.0, measured[-1][0])
