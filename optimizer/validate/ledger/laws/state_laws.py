"""Laws that a compressed state obeys whatever the data. The output's distance to float must allow
what the recipe's budget allows, so a fault smaller than the budget would hide behind it; these
do not depend on the budget.

 1. weights   no weight inside the integers' range lies further than half a step from its integer,
              where the method rounds to nearest, nor further than integers that were the nearest
              can be moved, where one moves them; every scale is one that it chooses from; no
              scale is wider than its group needs, or narrower, beyond what the method may choose
              (validate/ledger/limits/rounding_limits.py). Where it does not round to nearest, a
              group, row or module that holds oddly much or little of its float weight, <W, Q> / <W,
              W>, and one whose low bits look lost, is suspected
              (validate/ledger/limits/resampled.py)
 2. others    every parameter that is replaced is one a method may replace
 3. biases    that of a quantized convolution is made of steps of its input times those of its
              weight, and lies within half a step of the checkpoint's, corrected where it is
 4. norms     a learned norm weight lies as near to where folding alone puts it as its steps allow
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from optimizer.compress.convolutions import bias_step, round_bias
from optimizer.compress.methods.weights.rtn import candidates
from optimizer.foundation.qtensor import FP16_SMALLEST_NORMAL, QTensor, absmax_scale
from optimizer.foundation.state import CompressedState, weight_name
from optimizer.model.architectures.family_record import Family
from optimizer.validate.ledger.breach import breach
from optimizer.validate.ledger.limits.resampled import Statistic, Suspect
from optimizer.validate.ledger.limits.rounding_limits import GRID, SCREEN, Rounding
from optimizer.validate.ledger.pieces.roundoff import UNIT


def weights(
    state: CompressedState,
    kept: Callable[[str], Tensor],
    rounded: Callable[[str], Tensor],
    parameters: Collection[str],
    rounding: Callable[[str], Rounding],
) -> tuple[list[str], list[Suspect]]:
    """Law 1: what is broken, and what is suspected, per parameter.

    rounded: the float weight of a parameter that was rounded; kept: with 0 where it was pruned.
    parameters: those of the checkpoint; rounding: what the method of a parameter may do.
    """
    broken: list[str] = []
    suspects: list[Suspect] = []
    for name, q in state.weights.items():
        if name not in parameters:
            broken.append(f"{name}: the checkpoint has no such parameter")
            continue
        value = rounded(name)
        if q.integers.shape != value.shape:
            broken.append(f"{name}: integers {tuple(q.integers.shape)} for {tuple(value.shape)}")
            continue
        left = kept(name)
        fault = _weight(q, left, rounding(name), value)
        if fault:
            broken.append(f"{name}: {fault}")
        elif rounding(name).compared:
            suspects += _suspects(name, q, left)
    return broken, suspects


def _grouped(q: QTensor, value: Tensor) -> Tensor:
    """value (out, in) as (rows, groups, inputs)."""
    rows = (1, 1, -1) if q.scheme.granularity == "tensor" else (len(value), q.scale.shape[1], -1)
    return value.reshape(rows)


def _weight(q: QTensor, value: Tensor, rounding: Rounding, dense: Tensor | None = None) -> str:
    """dense: where value was pruned, what it was before. value is then 0 where the integer is, and
    a kept weight may have become 0 as well, so that what a scale needs lies between the two."""
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point.float()
    ends = torch.stack([(q.scheme.low - zero) * q.scale, (q.scheme.high - zero) * q.scale])
    (lowest, highest), step = ends.sort(0).values, q.scale.abs()
    grouped = _grouped(q, value)
    if rounding.steps < math.inf:
        inside = grouped.clamp(lowest[..., None], highest[..., None])
        coded = _grouped(q, q.dequantize())
        # a scale that was learned has moved, and what an integer is worth with it
        moved = 0.0 if rounding.nearest else rounding.scale[1] * GRID - 1
        error = ((coded - inside).abs() - moved * coded.abs()).amax(-1) / step
        allowed = rounding.steps * (1 + moved)
        if float(error.max()) > allowed:
            row, group = divmod(int(error.argmax()), error.shape[1])
            return (
                f"row {row} group {group} is {float(error.max()):.4f} steps away, not {allowed:.3g}"
            )
    if rounding.candidates_only:
        other = ~(candidates(value, q.scheme) == q.scale).any(0)
        if bool(other.any()):
            row, group = divmod(int(other.int().argmax()), other.shape[1])
            return f"row {row} group {group} has a scale that round to nearest does not choose from"
    least, most = rounding.scale
    narrow, wide = (step / _needed(q, v) for v in (value, value if dense is None else dense))
    for ratios, worst in ((narrow, int(narrow.argmin())), (wide, int(wide.argmax()))):
        ratio = float(ratios.flatten()[worst])
        fine = ratio >= least / GRID if ratios is narrow else ratio <= most * GRID
        if not fine:
            row, group = divmod(worst, ratios.shape[1])
            return f"row {row} group {group} has a scale {ratio:.4f} times what it needs"
    return ""


def _needed(q: QTensor, value: Tensor) -> Tensor:
    """What just covers each group of value (out, in), in the shape of q's scale."""
    grouped = _grouped(q, value)
    if q.scheme.full_range:
        return absmax_scale(value, q.scheme)[0].abs()
    if q.zero_point is None:
        needed = grouped.abs().amax(-1) / q.scheme.high
    else:
        reach = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
        needed = reach / (q.scheme.high - q.scheme.low)
    return needed.clamp(min=FP16_SMALLEST_NORMAL)


def _suspects(name: str, q: QTensor, value: Tensor) -> list[Suspect]:
    """The group, the row and the module that hold most and least of their weight, where that is
    beyond the screen, and a module whose low bits look lost."""
    quantized, grouped = _grouped(q, q.dequantize()), _grouped(q, value)
    # What is below the smallest scale is 0, as it should be.
    tiny = grouped.abs().amax(-1) < FP16_SMALLEST_NORMAL * q.scheme.high
    part = (grouped * quantized).sum(-1).masked_fill(tiny, 0.0).double()
    whole = grouped.square().sum(-1).masked_fill(tiny, 0.0).double()
    suspects = []
    for level, limits, over, of in (
        ("group", SCREEN.share, part, whole),
        ("row", SCREEN.share, part.sum(1), whole.sum(1)),
        ("module", SCREEN.share_module, part.sum(), whole.sum()),
    ):
        share = torch.where(of > 0, over / of.clamp(min=1e-300), torch.ones_like(of)).flatten()
        for worst in {int(share.argmin()), int(share.argmax())}:
            if limits[0] <= float(share[worst]) <= limits[1]:
                continue
            row, group = divmod(worst, part.shape[1] if level == "group" else 1)
            at = {"group": f"row {row} group {group}", "row": f"row {row}", "module": "it"}[level]
            message = f"{name}: {at} holds {float(share[worst]):.2f} of its float weight"
            statistic = _holding(group if level == "group" else None, level == "module")
            number = None if level == "module" else row
            suspects.append(Suspect(name, number, statistic, message, part.numel()))
    odd, usual = float((q.integers & 1).float().mean()), _nearest_odd(q, grouped)
    if odd < SCREEN.odd * usual:
        message = f"{name}: {odd:.1%} of its integers are odd, {usual:.0%} of the nearest"
        suspects.append(Suspect(name, None, _odd, message, 1))
    return suspects


def _holding(group: int | None, whole: bool) -> Statistic:
    """<W, Q> / <W, W> of each row, of one group of it, or of all rows together."""

    def statistic(q: QTensor | Tensor, value: Tensor, _rows: Tensor) -> Tensor:
        assert isinstance(q, QTensor)
        quantized, grouped = _grouped(q, q.dequantize()), _grouped(q, value)
        part, size = (grouped * quantized).sum(-1), grouped.square().sum(-1)
        if whole:
            return (part.sum() / size.sum().clamp(min=1e-30))[None]
        at = slice(None) if group is None else slice(group, group + 1)
        return part[:, at].sum(1) / size[:, at].sum(1).clamp(min=1e-30)

    return statistic


def _odd(q: QTensor | Tensor, _value: Tensor, _rows: Tensor) -> Tensor:
    assert isinstance(q, QTensor)
    return (q.integers & 1).float().mean()[None]


def _nearest_odd(q: QTensor, grouped: Tensor) -> float:
    zero = 0 if q.zero_point is None else q.zero_point[..., None].int()
    nearest = (grouped / q.scale[..., None]).round().int() + zero
    return float((nearest & 1).float().mean())


def folded_norm_weight(
    state: CompressedState, source: Mapping[str, Tensor], name: str, known: Family, rotated: bool
) -> Tensor:
    """The weight of a norm that folding alone gives: ones where rotation folded it away; else what
    undoes the scale that the columns of the module which reads it were given."""
    float_weight = source[name]
    read = (*(p.producer for p in known.smooth), known.final_norm)
    if rotated and any(name.endswith(f".{norm}.weight") for norm in read if norm):
        return torch.ones_like(float_weight)
    for pair in known.smooth:
        suffix = f".{pair.producer}.weight"
        weight = f"{name.removesuffix(suffix)}.{pair.consumers[0]}.weight"
        if name.endswith(suffix) and weight in state.replaced:
            now, before = state.replaced[weight].double(), source[weight].double()
            columns = (now * before).sum(0) / before.square().sum(0).clamp(min=1e-30)
            return (float_weight.double() / columns).float()
    return float_weight


def norm_weights(
    state: CompressedState,
    source: Mapping[str, Tensor],
    known: Family,
    rotated: bool,
    limit: float,
) -> list[str]:
    """Law 4. limit: how far they may lie from where folding put them, in units of their mean."""
    broken = []
    for name in learned_norm_weights(state, source):
        folded = folded_norm_weight(state, source, name, known, rotated)
        moved = (state.replaced[name] - folded).abs().max() / folded.abs().mean().clamp(min=1e-30)
        if not float(moved) <= limit:
            shown = breach(float(moved), limit)
            broken.append(
                f"{name}: a norm weight was learned {shown[0]} of their mean away from where "
                f"folding put it, its steps add up to {shown[1]}"
            )
    return broken


def learned_norm_weights(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """The replaced parameters that a rounding method may have learned: vectors that are no bias."""
    return [
        n for n in state.replaced if n.endswith(".weight") and n in source and source[n].ndim == 1
    ]


def integer_biases(
    state: CompressedState, source: Mapping[str, Tensor], corrections: Mapping[str, Tensor]
) -> dict[str, str]:
    """Law 3: {bias of a convolution: what is wrong with it, "" where nothing is}. corrections:
    {bias: what was added to it}, which bias_correction_laws.py judges."""
    words = {}
    for name in state.replaced:
        module, _, part = name.rpartition(".")
        covered, weight = state.range_of(module), weight_name(module)
        if part != "bias" or covered is None or weight not in state.weights:
            continue
        if name not in source or source[weight].ndim != 4:
            continue
        value, own = state.replaced[name], source[name] + corrections.get(name, 0)
        scale = state.weights[weight].scale
        step = bias_step(covered, scale)
        moved = ((value.double() - own.double()).abs() / step).max()
        words[name] = ""
        # half a step, and half a unit of the last place of the sum in float32
        limit = 0.5 + float((own.double().abs() / step).max()) * UNIT["fp32"]
        if not torch.equal(round_bias(value, covered, scale), value):
            words[name] = f"{name}: is not made of steps of its input times those of its weight"
        elif not float(moved) <= limit:
            words[name] = f"{name}: lies {float(moved):.4g} steps from the checkpoint's, not 0.5"
    return words


def replaced(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """Law 2: same shape, finite, and one the checkpoint has."""
    broken = []
    for name in state.replaced:
        value = state.replaced[name]
        if name not in source:
            broken.append(f"{name}: the checkpoint has no such parameter")
        elif value.shape != source[name].shape:
            broken.append(f"{name}: {tuple(value.shape)} for {tuple(source[name].shape)}")
        elif not bool(torch.isfinite(value).all()):
            broken.append(f"{name}: holds NaN or infinity")
    return broken
