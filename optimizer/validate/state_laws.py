"""Laws that a compressed state obeys whatever the data. The output's distance to float must allow
what the recipe's budget allows, so a fault smaller than the budget would hide behind it; these
do not depend on the budget.

 1. weights   no weight inside the integers' range lies further than half a step from its integer,
              where the method rounds to nearest; no scale is wider than its group needs, or
              narrower, beyond what the method may choose (rounding_limits.py). Where it does not
              round to nearest, a group, row or module that holds oddly much or little of its float
              weight, <W, Q> / <W, W>, and one whose low bits look lost, is suspected
              (resampled.py)
 2. ranges    a static range lies no further from the one that the same method chooses when the
              calibration texts go through the finished model than ranges of the float model do:
              quantization moves what a module reads by some part of that
 3. biases    a corrected bias brings the module's mean output nearer to the exact one's
 4. others    every parameter that is replaced is one a method may replace
 5. gains     a learned norm weight lies as near to where folding alone puts it as its steps
              allow
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import code_per_token, code_static
from optimizer.compress.statistics import Histogram, chooser
from optimizer.harness.tasks.batch import Batch
from optimizer.load.families import Family
from optimizer.qtensor import FP16_SMALLEST_NORMAL, QTensor
from optimizer.recipe import Activations
from optimizer.state import CompressedState, Range
from optimizer.validate import trace
from optimizer.validate.breach import breach
from optimizer.validate.distance import Array
from optimizer.validate.resampled import Statistic, Suspect
from optimizer.validate.rounding_limits import GRID, HALF_STEP, SCREEN, Rounding
from optimizer.validate.spread import upper_bound
from optimizer.validate.trace import Trace

COMPARED = 4  # of so many calibration batches one goes through the float model as well


def weights(
    state: CompressedState,
    rounded: Callable[[str], Tensor],
    parameters: Collection[str],
    rounding: Callable[[str], Rounding],
) -> tuple[list[str], list[Suspect]]:
    """Law 1: what is broken, and what is suspected, per parameter.

    rounded: the float weight of a parameter that was rounded; parameters: those of the checkpoint;
    rounding: what the method of a parameter may do.
    """
    broken: list[str] = []
    suspects: list[Suspect] = []
    for name, q in state.weights.items():
        if name not in parameters:
            broken.append(f"{name}: the checkpoint has no such parameter")
            continue
        value = rounded(name)
        if q.codes.shape != value.shape:
            broken.append(f"{name}: integers {tuple(q.codes.shape)} for {tuple(value.shape)}")
            continue
        fault = _weight(q, value, rounding(name))
        if fault:
            broken.append(f"{name}: {fault}")
        elif not rounding(name).nearest:
            suspects += _suspects(name, q, value)
    return broken, suspects


def _grouped(q: QTensor, value: Tensor) -> Tensor:
    """value (out, in) as (rows, groups, inputs)."""
    rows = (1, 1, -1) if q.scheme.granularity == "tensor" else (len(value), q.scale.shape[1], -1)
    return value.reshape(rows)


def _weight(q: QTensor, value: Tensor, rounding: Rounding) -> str:
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point.float()
    lowest, highest = (q.scheme.low - zero) * q.scale, (q.scheme.high - zero) * q.scale
    grouped = _grouped(q, value)
    if rounding.nearest:
        inside = grouped.clamp(lowest[..., None], highest[..., None])
        error = (_grouped(q, q.dequantize()) - inside).abs().amax(-1) / q.scale
        if float(error.max()) > HALF_STEP:
            row, group = divmod(int(error.argmax()), error.shape[1])
            return f"row {row} group {group} is {float(error.max()):.4f} steps away, not 0.5"
    if q.zero_point is None:
        needed = grouped.abs().amax(-1) / q.scheme.high
    else:
        reach = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
        needed = reach / (q.scheme.high - q.scheme.low)
    wide = q.scale / needed.clamp(min=FP16_SMALLEST_NORMAL)
    least, most = rounding.scale
    for worst in (wide.argmin(), wide.argmax()):
        ratio = float(wide.flatten()[worst])
        if not least / GRID <= ratio <= most * GRID:
            row, group = divmod(int(worst), wide.shape[1])
            return f"row {row} group {group} has a scale {ratio:.4f} times what it needs"
    return ""


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
        ("group", SCREEN.held, part, whole),
        ("row", SCREEN.held, part.sum(1), whole.sum(1)),
        ("module", SCREEN.held_module, part.sum(), whole.sum()),
    ):
        held = torch.where(of > 0, over / of.clamp(min=1e-300), torch.ones_like(of)).flatten()
        for worst in {int(held.argmin()), int(held.argmax())}:
            if limits[0] <= float(held[worst]) <= limits[1]:
                continue
            row, group = divmod(worst, part.shape[1] if level == "group" else 1)
            at = {"group": f"row {row} group {group}", "row": f"row {row}", "module": "it"}[level]
            message = f"{name}: {at} holds {float(held[worst]):.2f} of its float weight"
            statistic = _holding(group if level == "group" else None, level == "module")
            number = None if level == "module" else row
            suspects.append(Suspect(name, number, statistic, message, part.numel()))
    odd, usual = float((q.codes & 1).float().mean()), _nearest_odd(q, grouped)
    if odd < SCREEN.odd * usual:
        message = f"{name}: {odd:.1%} of its integers are odd, {usual:.0%} of the nearest"
        suspects.append(Suspect(name, None, _odd, message, 1))
    return suspects


def _holding(group: int | None, whole: bool) -> Statistic:
    """<W, Q> / <W, W> of each row, of one group of it, or of all rows together."""

    def statistic(q: QTensor, value: Tensor, _rows: Tensor) -> Tensor:
        quantized, grouped = _grouped(q, q.dequantize()), _grouped(q, value)
        part, size = (grouped * quantized).sum(-1), grouped.square().sum(-1)
        if whole:
            return (part.sum() / size.sum().clamp(min=1e-30))[None]
        at = slice(None) if group is None else slice(group, group + 1)
        return part[:, at].sum(1) / size[:, at].sum(1).clamp(min=1e-30)

    return statistic


def _odd(q: QTensor, _value: Tensor, _rows: Tensor) -> Tensor:
    return (q.codes & 1).float().mean()[None]


def _nearest_odd(q: QTensor, grouped: Tensor) -> float:
    zero = 0 if q.zero_point is None else q.zero_point[..., None].int()
    nearest = (grouped / q.scale[..., None]).round().int() + zero
    return float((nearest & 1).float().mean())


def ranges(
    state: CompressedState,
    method: Activations,
    finished: nn.Module,
    floats: nn.Module,
    batches: Iterable[Batch],
) -> list[str]:
    """Law 2. finished: the simulated model; floats: the folded float one. batches: of the
    calibration texts."""
    choose = chooser(method.range, method.percentile, method.symmetric)
    whole, part, usual = ({site: Histogram() for site in state.ranges} for _ in range(3))
    modules = [site.removesuffix(":input") for site in state.ranges]

    def observe(model: nn.Module, batch: Batch, *histograms: dict[str, Histogram]) -> None:
        def see(module: str, rows: Tensor) -> None:
            site = f"{module}:input"
            factor = state.factors.get(site)
            for kept in histograms:
                kept[site].update(rows if factor is None else rows * factor)

        trace.observe(model, batch, modules, see)

    for i, batch in enumerate(batches):
        if i % COMPARED:
            observe(finished, batch, whole)
        else:
            observe(finished, batch, whole, part)
            observe(floats, batch, usual)
    empty = [site for site, histogram in whole.items() if not histogram.total]
    if empty:
        return [f"{site}: no input of that module was seen" for site in empty]
    now = {site: choose(histogram) for site, histogram in whole.items()}
    moved = []
    for site, histogram in part.items():
        own = choose(histogram)
        # What a bin of the histogram, or a step of the integers, cannot tell apart is nothing.
        least = histogram.width / _width(own) + 1 / 255
        moved.append(max(_apart(choose(usual[site]), own), least))
    limit = upper_bound(moved, len(moved), len(moved), 1 / 255)
    problems = []
    for site, kept in state.ranges.items():
        far, wanted = _apart(kept, now[site]), now[site]
        if not far <= limit:
            shown = breach(far, limit)
            problems.append(
                f"{site}: [{kept.low:.4g}, {kept.high:.4g}] lies {shown[0]} of its width from what "
                f"the calibration texts give, [{wanted.low:.4g}, {wanted.high:.4g}]; quantization "
                f"moves ranges of this model by up to {shown[1]}"
            )
    return problems


def _width(covered: Range) -> float:
    return max(covered.high - covered.low, 1e-30)


def _apart(a: Range, b: Range) -> float:
    """How far the further pair of ends lies apart, as a share of the wider of both. Judged as they
    are coded: a symmetric range by its scale, whatever it calls its ends."""
    ends = [(-r.zero_point * r.scale, (255 - r.zero_point) * r.scale) for r in (a, b)]
    far = max(abs(x - y) for x, y in zip(*ends, strict=True))
    return float(far / max(_width(a), _width(b)))


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
    state: CompressedState,
    source: Mapping[str, Tensor],
    known: Family,
    rotated: bool,
    limit: float,
) -> list[str]:
    """Law 5. limit: how far they may lie from where folding put them, in units of their mean."""
    broken = []
    for name in learned_gains(state, source):
        wanted = folded_gain(state, source, name, known, rotated)
        moved = (state.replaced[name] - wanted).abs().max() / wanted.abs().mean().clamp(min=1e-30)
        if not float(moved) <= limit:
            shown = breach(float(moved), limit)
            broken.append(
                f"{name}: a norm weight was learned {shown[0]} of their mean away from where "
                f"folding put it, its steps add up to {shown[1]}"
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
