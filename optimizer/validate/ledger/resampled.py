"""The null model of a rounding method: the same method on resampled calibration texts.

A statistic that no definition bounds is judged by what a correct run makes of it: the suspicious
rows of a weight, and others of the same weight as controls, are rounded again RESAMPLES times, each
time with every calibration text counted a random number of times (Poisson(1): the bootstrap of a
sum). A row is refused where its statistic lies further from those of its own re-roundings than the
re-roundings of all rows do from each other, by the tolerance bound of spread.py for as many looks
as rows were screened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from optimizer.compress.apply.pruning import Prunable
from optimizer.compress.apply.rounding import (
    FloatWeight,
    float_target,
    left_float,
    moments_of,
    rounded,
)
from optimizer.compress.methods.hessian import counted, leading
from optimizer.compress.simulate import code_per_token, code_static
from optimizer.harness.inputs.batch import Batch
from optimizer.qtensor import QTensor
from optimizer.state import input_name, owner_of
from optimizer.validate.ledger import roundoff, trace
from optimizer.validate.ledger.spread import MISSED, tolerance_factor

if TYPE_CHECKING:
    from optimizer.validate.materials import Materials

RESAMPLES = 6
CONTROLS = 24
SMALLEST = 1e-4  # of a statistic: what float32 sums over a row differ by

Statistic = Callable[[QTensor | Tensor, Tensor, Tensor], Tensor]
"""(quantized rows, or float ones that are pruned only; their float weight; their row numbers) ->
(rows,), or (1,) of all of them."""


@dataclass(frozen=True)
class Suspect:
    """A row of a parameter (None: the whole of it) whose `statistic` was screened among `looks`."""

    parameter: str
    row: int | None
    statistic: Statistic
    message: str
    looks: int


def judged(m: Materials, suspects: Sequence[Suspect]) -> tuple[list[str], list[str]]:
    """(what is refused, what cannot be judged), a sentence each."""
    refused, unjudged = [], []
    for parameter in dict.fromkeys(s.parameter for s in suspects):
        own = [s for s in suspects if s.parameter == parameter]
        if parameter in m.state.weights and m.rounding(parameter).learned:
            unjudged += [f"{s.message} (learned: no null model)" for s in own]
            continue
        refused += _refused(m, parameter, own)
    return refused, unjudged


def _refused(m: Materials, parameter: str, suspects: Sequence[Suspect]) -> list[str]:
    weights = m.state.weights
    stored = weights[parameter] if parameter in weights else m.state.replaced[parameter]
    weight = m.rounded_weight(parameter)
    generator = torch.Generator().manual_seed(0)
    controls = torch.randperm(len(weight), generator=generator)[:CONTROLS].tolist()
    rows = torch.tensor(sorted({*controls, *(s.row for s in suspects if s.row is not None)}))
    if isinstance(stored, QTensor) and stored.scheme.granularity == "tensor":
        rows = torch.arange(len(weight))
    again = _rounded_again(m, parameter, weight[rows])
    mine = _some_rows(stored, rows)
    problems = []
    for s in suspects:
        null = np.stack([s.statistic(q, weight[rows], rows).double().numpy() for q in again])
        value = s.statistic(mine, weight[rows], rows).double().numpy()
        at = 0 if s.row is None else rows.tolist().index(s.row)
        limit = _limit(null, at, s.looks)
        far = abs(float(value[at]) - float(null[:, at].mean()))
        if not far <= limit:
            problems.append(
                f"{s.message}; rounded again on resampled texts it is {null[:, at].mean():.3g} +- "
                f"{limit:.2g}, not {float(value[at]):.3g}"
            )
    return problems


def _limit(null: roundoff.Floats, at: int, looks: int) -> float:
    """null (resamples, rows): how far from its mean a correct row may lie."""
    count, rows = null.shape
    variance = null.var(0, ddof=1)
    spread = np.sqrt(max(float(variance.mean()), float(variance[at])) * (1 + 1 / count))
    factor = tolerance_factor(max(rows * (count - 1), 3), 1 - MISSED / max(looks, 1))
    return float(max(factor * spread, SMALLEST))


def values_of(q: QTensor | Tensor) -> Tensor:
    """(rows, in) float32."""
    return q if isinstance(q, Tensor) else q.dequantize()


def _some_rows(q: QTensor | Tensor, rows: Tensor) -> QTensor | Tensor:
    if isinstance(q, Tensor):
        return q[rows]
    if q.scheme.granularity == "tensor":
        return q
    zero = None if q.zero_point is None else q.zero_point[rows]
    return QTensor(q.codes[rows], q.scale[rows], zero, q.scheme)


def _rounded_again(m: Materials, parameter: str, weight: Tensor) -> Sequence[QTensor | Tensor]:
    """The rows of `weight` by the recipe's method, RESAMPLES times."""
    module = owner_of(parameter)
    quantize = m.section.quantize
    sparsity = m.section.sparsity if parameter in m.state.sparsity else None
    sums = _sums(m, module, weight)
    if parameter in m.state.weights:
        scheme, method = m.state.weights[parameter].scheme, quantize.block_rounding
        weights = [FloatWeight(module, weight, scheme, H, P, False, sparsity) for H, P in sums]
        return [rounded(w, method, quantize)[0] for w in weights]
    assert sparsity is not None
    options, method = moments_of(quantize, sparsity), quantize.of_kind("float")[0]
    floats = [
        Prunable(module, weight, sparsity, options.damping, options.act_order, H, P)
        for H, P in sums
    ]
    return [left_float(w, method)[0] for w in floats]


def _sums(m: Materials, module: str, weight: Tensor) -> list[tuple[Tensor, Tensor | None]]:
    """(H, P) of compress/methods/hessian.py, once per resample, over the calibration texts."""
    quantize, head = m.section.quantize, module == m.family.head
    options = moments_of(quantize, m.section.sparsity)
    inputs, limit = weight.shape[1], options.token_limit
    against_float = float_target(quantize, m.section.sparsity) and not head
    factor = m.state.factor_of(module)
    reference = m.float_model if m.state.pruned_floats else m.folded_model
    hessians = [torch.zeros(inputs, inputs) for _ in range(RESAMPLES)]
    gradients = [torch.zeros(inputs, len(weight)) for _ in range(RESAMPLES)]
    generator = torch.Generator().manual_seed(1)
    for batch in m.calibration():
        compressed = _inputs(m.simulated_model, batch, module)
        float_inputs = _inputs(reference, batch, module) if against_float else []
        for use, rows in enumerate(compressed):
            real = _positions(batch, len(rows))
            scaled = rows if factor is None else rows * factor
            quantized = _quantized_input(m, module, scaled)
            share = torch.ones(len(rows), 1) if head else counted(quantized, limit)
            first = leading(real, options.first_token)
            if len(first) == len(rows) and not head:
                share = share * first
            quantized = quantized * share
            texts = torch.arange(len(real)).repeat_interleave(real.sum(1))
            missed = None
            if against_float:
                full = float_inputs[use] if factor is None else float_inputs[use] * factor
                missed = (full * share - quantized) @ weight.T
            for h, p in zip(hessians, gradients, strict=True):
                times = torch.poisson(torch.ones(len(real)), generator=generator)
                own = times[texts][:, None] if len(texts) == len(rows) else 1.0
                h.addmm_((quantized * own).T, quantized)
                if missed is not None:
                    p.addmm_((quantized * own).T, missed)
    return [(h, p if against_float else None) for h, p in zip(hessians, gradients, strict=True)]


def _positions(batch: Batch, rows: int) -> torch.Tensor:
    """(inputs, positions) bool: those that are not padding. rows: of what a module read; all of
    them are real where nothing is ever padded."""
    real = torch.from_numpy(batch.real)
    return real if real.ndim > 1 else real[:, None].expand(len(real), rows // len(real))


def _inputs(model: torch.nn.Module, batch: Batch, module: str) -> list[Tensor]:
    """(tokens, in) of each use of the module."""
    rows: list[Tensor] = []
    trace.observe(model, batch, (module,), lambda _name, x: rows.append(x.clone()))
    return rows


def _quantized_input(m: Materials, module: str, x: Tensor) -> Tensor:
    mode = m.state.activations_of(module)
    if mode is None:
        return x
    return (
        code_per_token(x) if mode == "token" else code_static(x, m.state.ranges[input_name(module)])
    )
