"""Laws that a compressed state obeys whatever the data. The output's distance to float must allow
what the recipe's budget allows, so a fault smaller than the budget would hide behind it; these
do not depend on the budget.

 1. weights   no weight inside the codes' range lies further than half a step from its code,
              where the method rounds to nearest. Of the others (and rounding_laws.py) each group
              holds as much of its float weight as is declared (tolerances.Projected), so does each
              row and the whole: a method may leave the weight, but not in size; and of a module's
              codes about as many are odd as of the nearest ones. No scale is wider than its group
              needs, or narrower, beyond what the method may choose
 2. ranges    a static range is no more than RANGE_DRIFT times wider or narrower than the one the
              same method chooses when the calibration texts go through the finished model
 3. biases    a corrected bias brings the module's mean output nearer to the exact one's
 4. others    every parameter that is replaced is one a method may replace
 5. gains     a learned norm gain lies within GAIN_DRIFT of what folding alone makes of it
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import code_per_token, code_static
from optimizer.compress.statistics import Histogram, chooser
from optimizer.harness.tasks.batch import Batch
from optimizer.load.families import Family
from optimizer.qtensor import FP16_SMALLEST_NORMAL, QTensor
from optimizer.recipe import Activations
from optimizer.state import CompressedState
from optimizer.validate import trace
from optimizer.validate.distance import Array
from optimizer.validate.tolerances import (
    GAIN_DRIFT,
    LEAST_ODD,
    NARROWEST_SCALE,
    RANGE_DRIFT,
    ROUNDING,
    SCALE_SLACK,
    WEIGHT_STEPS,
    ZERO_POINT_DRIFT,
    Projected,
    Rounding,
)
from optimizer.validate.trace import Trace

HAIR = 1e-4  # of a step: float32 rounding of weight / scale


def weights(
    state: CompressedState,
    source: Mapping[str, Tensor],
    rounding: Rounding = ROUNDING["rtn"],
    nearest: Collection[str] = (),
) -> list[str]:
    """Law 1. What is broken, one sentence per parameter. nearest: parameters that are rounded to
    nearest though `rounding` does not."""
    broken = []
    for name, q in state.weights.items():
        if name not in source:
            broken.append(f"{name}: the checkpoint has no such parameter")
            continue
        value = state.replaced[name] if name in state.replaced else source[name]
        factor = state.factors.get(f"{name.removesuffix('.weight')}:input")
        if factor is not None:
            value = value / factor[None]
        found = _weight(q, value, ROUNDING["rtn"] if name in nearest else rounding)
        if found:
            broken.append(f"{name}: {found}")
    return broken


def _weight(q: QTensor, value: Tensor, rounding: Rounding) -> str:
    if q.codes.shape != value.shape:
        return f"codes {tuple(q.codes.shape)} for {tuple(value.shape)}"
    rows = (1, 1, -1) if q.scheme.granularity == "tensor" else (*q.scale.shape, -1)
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point.float()
    lowest, highest = (q.scheme.low - zero) * q.scale, (q.scheme.high - zero) * q.scale
    grouped = value.reshape(rows)
    inside = grouped.clamp(lowest[..., None], highest[..., None])
    error = (q.dequantize().reshape(rows) - inside).abs().amax(-1) / q.scale
    if rounding.nearest and float(error.max()) > WEIGHT_STEPS + HAIR:
        row, group = divmod(int(error.argmax()), error.shape[1])
        return f"row {row} group {group} is {float(error.max()):.2f} steps away, not {WEIGHT_STEPS}"
    if rounding.projected:
        lost = _held(q, grouped, rounding.projected[q.scheme.bits]) or _even(q, grouped)
        if lost:
            return lost
    if q.zero_point is None:
        needed = grouped.abs().amax(-1) / q.scheme.high
    else:
        spread = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
        needed = spread / (q.scheme.high - q.scheme.low)
    wide = q.scale / needed.clamp(min=FP16_SMALLEST_NORMAL)
    narrowest, widest = rounding.scale or (NARROWEST_SCALE[q.scheme.bits], 1.0)
    if rounding.clipped is not None:
        # a few outliers may lie beyond the codes; a scale that is wrong saturates many of them
        least, most = rounding.clipped
        ends = (q.codes == q.scheme.low) | (q.codes == q.scheme.high)
        saturated = ends.reshape(rows).float().mean(-1)
        clipped = (wide >= least) & (wide < narrowest) & (saturated <= most)
        wide = torch.where(clipped, torch.ones_like(wide), wide)
    for worst in (wide.argmin(), wide.argmax()):
        found = float(wide.flatten()[worst])
        if not narrowest / SCALE_SLACK <= found <= widest * SCALE_SLACK:
            row, group = divmod(int(worst), wide.shape[1])
            return f"row {row} group {group} has a scale {found:.2f} times what it needs"
    return ""


def _held(q: QTensor, grouped: Tensor, limits: Projected) -> str:
    """grouped: the float weight (rows, groups, inputs). What is below the smallest scale is 0."""
    coded = q.dequantize().reshape(grouped.shape)
    tiny = grouped.abs().amax(-1) < FP16_SMALLEST_NORMAL * q.scheme.high
    part, whole = (grouped * coded).sum(-1), grouped.square().sum(-1)
    part, whole = (t.masked_fill(tiny, 0.0).double() for t in (part, whole))
    for level, (least, most), over, of in (
        ("group", limits.group, part, whole),
        ("row", limits.row, part.sum(1), whole.sum(1)),
        ("module", limits.module, part.sum(), whole.sum()),
    ):
        held = torch.where(of > 0, over / of.clamp(min=1e-300), torch.ones_like(of)).flatten()
        for worst in (int(held.argmin()), int(held.argmax())):
            if not least <= float(held[worst]) <= most:
                row, group = divmod(worst, grouped.shape[1] if level == "group" else 1)
                at = {"group": f"row {row} group {group}", "row": f"row {row}", "module": "it"}
                return (
                    f"{at[level]} holds {float(held[worst]):.2f} of its float weight, {least} to "
                    f"{most} is declared"
                )
    return ""


def _even(q: QTensor, grouped: Tensor) -> str:
    """In 8 bits lost low bits are a small error, which a rounder that came later may even have made
    up for. grouped: as in _held."""
    zero = 0 if q.zero_point is None else q.zero_point[..., None].int()
    nearest = (grouped / q.scale[..., None]).round().int() + zero
    found, wanted = (float((codes & 1).float().mean()) for codes in (q.codes, nearest))
    if found < LEAST_ODD * wanted:
        return f"{found:.1%} of its codes are odd, {wanted:.0%} of the nearest: low bits are lost"
    return ""


def ranges(
    state: CompressedState, method: Activations, model: nn.Module, batches: Iterable[Batch]
) -> list[str]:
    """Law 2. model: the simulated one. batches: of the calibration texts."""
    choose = chooser(method.range, method.percentile, method.symmetric)
    seen = {site: Histogram() for site in state.ranges}

    def see(module: str, rows: Tensor) -> None:
        site = f"{module}:input"
        seen[site].update(rows * state.factors[site] if site in state.factors else rows)

    modules = [site.removesuffix(":input") for site in seen]
    for batch in batches:
        trace.observe(model, batch, modules, see)
    broken = []
    for site, kept in state.ranges.items():
        if not seen[site].total:
            broken.append(f"{site}: no input of that module was seen")
            continue
        now = choose(seen[site])
        ratio = kept.scale / max(now.scale, 1e-30)
        if not 1 / RANGE_DRIFT <= ratio <= RANGE_DRIFT:
            broken.append(
                f"{site}: [{kept.low:.3g}, {kept.high:.3g}] is {ratio:.2g} times as wide as the "
                f"calibration texts give, [{now.low:.3g}, {now.high:.3g}]"
            )
        elif abs(kept.zero_point - now.zero_point) > ZERO_POINT_DRIFT:
            broken.append(
                f"{site}: zero point {kept.zero_point}; the calibration texts give {now.zero_point}"
            )
    return broken


def folded_bias(state: CompressedState, source: Mapping[str, Tensor], module: str) -> Tensor:
    """The bias that folding alone gives: scaled by row as the weight's rows were, if they were."""
    bias, weight = source[f"{module}.bias"], f"{module}.weight"
    if weight not in state.replaced:
        return bias
    now, before = state.replaced[weight].double(), source[weight].double()
    rows = (now * before).sum(1) / before.square().sum(1).clamp(min=1e-30)
    if float((now - rows[:, None] * before).norm()) > 1e-4 * float(now.norm()):
        return bias  # columns were scaled: the inputs' side of a fold
    return (bias.double() * rows).float()


def folded_gain(
    state: CompressedState, source: Mapping[str, Tensor], name: str, known: Family, rotated: bool
) -> Tensor:
    """The gain of a norm that folding alone gives: ones where rotation folded it away; else what
    undoes the scale that the columns of the module which reads it were given."""
    gain = source[name]
    read = (*(p.producer for p in known.smooth), known.final_norm)
    if rotated and any(name.endswith(f".{norm}.weight") for norm in read if norm):
        return torch.ones_like(gain)
    for pair in known.smooth:
        suffix = f".{pair.producer}.weight"
        weight = f"{name.removesuffix(suffix)}.{pair.consumers[0]}.weight"
        if name.endswith(suffix) and weight in state.replaced:
            now, before = state.replaced[weight].double(), source[weight].double()
            columns = (now * before).sum(0) / before.square().sum(0).clamp(min=1e-30)
            return (gain.double() / columns).float()
    return gain


def gains(
    state: CompressedState, source: Mapping[str, Tensor], known: Family, rotated: bool
) -> list[str]:
    """Law 5."""
    broken = []
    for name in learned_gains(state, source):
        wanted = folded_gain(state, source, name, known, rotated)
        moved = (state.replaced[name] - wanted).abs().max() / wanted.abs().mean().clamp(min=1e-30)
        if not float(moved) <= GAIN_DRIFT:
            broken.append(
                f"{name}: a gain was learned {float(moved):.2g} of their mean away from where "
                f"folding put it, {GAIN_DRIFT} is declared"
            )
    return broken


def learned_gains(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """The replaced parameters that a rounder may have learned: vectors that are no bias."""
    return [
        n for n in state.replaced if n.endswith(".weight") and n in source and source[n].ndim == 1
    ]


def biases(
    state: CompressedState, source: Mapping[str, Tensor], traces: Sequence[Trace]
) -> list[str]:
    """Law 3. traces: of the simulated model on held-out texts.

    A correction is the mean of what coding takes away from the output, inputs moved into the
    range; without it the mean is off by `shift`, with it by `shift - moved`.
    """
    broken = []
    for name in state.replaced:
        module = name.removesuffix(".bias")
        if module == name or f"{module}.weight" not in state.weights:
            continue
        lost = _lost(state, source, module, traces)
        shift = lost.mean(0)
        moved = (state.replaced[name] - folded_bias(state, source, module)).double()
        noise = 4 * float((lost.var(0) / len(lost)).sum().sqrt())
        before, now = float(shift.norm()), float((shift - moved).norm())
        if now > 1.25 * before + noise:
            broken.append(
                f"{name}: the mean output is {before:.3g} from float's without the correction and "
                f"{now:.3g} with it"
            )
    return broken


def _lost(
    state: CompressedState, source: Mapping[str, Tensor], module: str, traces: Sequence[Trace]
) -> Tensor:
    """(tokens, outputs) float64: the exact output less the coded one, same input, no bias."""
    weight, site = f"{module}.weight", f"{module}:input"
    exact = state.replaced[weight] if weight in state.replaced else source[weight]
    factor = state.factors[site] if site in state.factors else torch.ones(exact.shape[1])
    x = torch.cat([torch.from_numpy(a) for a in _inputs(traces, module)]) * factor
    coded = x
    if state.activations == "token":
        coded = code_per_token(x)
    elif state.activations == "tensor":
        covered = state.ranges[site]
        x = x.clamp(-covered.zero_point * covered.scale, (255 - covered.zero_point) * covered.scale)
        coded = code_static(x, covered)
    return (x @ (exact / factor).T - coded @ state.weights[weight].dequantize().T).double()


def _inputs(traces: Sequence[Trace], module: str) -> list[Array]:
    """The real tokens' rows that entered `module`."""
    return [
        array[trace.mask.astype(bool)]
        for trace in traces
        for (name, _), array in trace.inputs.items()
        if name == module
    ]


def replaced(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """Law 4: same shape, finite, and one the checkpoint has."""
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
