"""Check a compressed state by laws that hold for any data.

compared   the integers, scales and replaced parameters of a state, with the checkpoint's values
limit      derived from each method's definition and options (limits/rounding_limits.py)
caught     scales wrong by a factor or a step, nibbles, rows or groups out of order, a transpose:
           test_a_subtle_fault_of_the_state_is_caught_at_its_hop_and_named,
           test_a_fault_of_the_integers_is_caught_at_compress

The output's distance to float has to allow the recipe's whole budget. A fault smaller than the
budget would hide behind it; these laws do not depend on it. Called by the hops `compress` (1) and
`fold` (2 to 4).

 1. weights   A weight inside the integers' range lies within half a step of its integer (half the
              distance between E4M3 values) where the method rounds to nearest, and within the sum
              of the method's steps where one moves integers that were the nearest. Each scale is
              one that the method chooses from, and neither wider nor narrower than its group needs,
              beyond the method's bounds. Where the method does not round to nearest, a group, row
              or module is suspected whose share <W, Q> / <W, W> of the float weight is beyond the
              screen, or whose low bits look lost (limits/resampled.py judges suspects).
 2. replaced  Each replaced parameter exists in the checkpoint, with the same shape and finite
              values.
 3. biases    The bias of a quantized convolution is a multiple of its input's step times its
              weight's, and lies within half a step of the checkpoint's, correction included.
 4. norms     A learned norm weight lies as close to its value after folding as its steps allow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from optimizer.compress.convolutions import compute_bias_step, round_bias
from optimizer.compress.methods.activations.equalization import divide_outputs, multiply_inputs
from optimizer.compress.methods.weights.rtn import list_scales
from optimizer.foundation.qtensor import FP16_SMALLEST_NORMAL, QTensor, absmax_scale, grouped
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.state import CompressedState, weight_name
from optimizer.model.architectures.family_record import Family
from optimizer.model.graph.record import BODY
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.limits.resampled import Statistic, Suspect
from optimizer.validate.ledger.limits.rounding_limits import GRID, SCREEN, Rounding
from optimizer.validate.ledger.pieces.roundoff import UNIT


def judge_weights(
    state: CompressedState,
    kept: Callable[[str], Tensor],
    rounded: Callable[[str], Tensor],
    parameters: Collection[str],
    rounding: Callable[[str], Rounding],
) -> tuple[list[str], list[Suspect]]:
    """Check law 1: return (problems, suspects) of the integers and scales of every quantized
    weight.

    kept: function name -> float weight, with 0 where it was pruned
    rounded: function name -> float weight before pruning
    parameters: names of the checkpoint's parameters
    rounding: function name -> bounds of the methods
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
        left, bounds = kept(name), rounding(name)
        fault = _first_fault(q, left, bounds, value)
        if fault:
            broken.append(f"{name}: {fault}")
        elif bounds.compared:
            suspects += _suspects(name, q, left)
    return broken, suspects


def _grouped(q: QTensor, value: Tensor) -> Tensor:
    """Reshape the judged `value` (out, in) to (*shape of the scale of q, values of a group), so
    that each scale stands beside its values."""
    return grouped(value, q.scheme)


def _first_fault(q: QTensor, value: Tensor, rounding: Rounding, dense: Tensor) -> str:
    """Return the first problem of a weight, or "". Rows are judged a few at a time.

    value: float weight (out, in), with 0 where its integer was pruned to 0
    rounding: bounds of the methods
    dense: float weight before pruning. Rounding may also turn a kept weight into 0, so the scale
        that a group needs lies between those of the two
    """
    slices = q.slices()
    if len(slices) == 1:
        return _weight(q, value, rounding, dense)
    each = (_weight(q.rows(at), value[at], rounding, dense[at], at.start) for at in slices)
    return next(filter(None, each), "")


def _weight(
    q: QTensor, value: Tensor, rounding: Rounding, dense: Tensor | None = None, first: int = 0
) -> str:
    """Return the first problem of some rows of a weight, or "". Arguments as in _first_fault.

    first: number of the first of these rows in the complete weight
    """
    zero = torch.zeros_like(q.scale) if q.zero_point is None else q.zero_point.float()
    ends = torch.stack([(q.scheme.low - zero) * q.scale, (q.scheme.high - zero) * q.scale])
    (lowest, highest), step = ends.sort(0).values, q.scale.abs()
    parts = _grouped(q, value)
    if rounding.steps < math.inf:
        inside = parts.clamp(lowest[..., None], highest[..., None])
        coded = _grouped(q, q.dequantize())
        # a learned scale has moved, and with it the value of each integer
        moved = 0.0 if rounding.nearest else rounding.scale[1] * GRID - 1
        if q.scheme.is_float:
            near = _grouped(q, q.integers)
            away = float4.steps_away if q.scheme.type == "float4" else float8.steps_away
            error = away(inside / step[..., None], near).amax(-1)
        else:
            error = ((coded - inside).abs() - moved * coded.abs()).amax(-1) / step
        allowed = rounding.steps * (1 + moved)
        if float(error.max()) > allowed:
            row, group = divmod(int(error.argmax()), error.shape[1])
            far = float(error.max())
            return f"row {first + row} group {group} is {far:.4f} steps away, {allowed:.3g} allowed"
    if rounding.candidates_only:
        other = ~(list_scales(value, q.scheme) == q.scale).any(0)
        if bool(other.any()):
            row, group = divmod(int(other.int().argmax()), other.shape[1])
            return (
                f"row {first + row} group {group} has a scale that round-to-nearest does not offer"
            )
    if q.scheme.type == "float4":
        return ""  # its scales are coarse: the candidates are the bound
    least, most = rounding.scale
    narrow, wide = (step / _needed(q, v) for v in (value, value if dense is None else dense))
    for ratios, worst in ((narrow, int(narrow.argmin())), (wide, int(wide.argmax()))):
        ratio = float(ratios.flatten()[worst])
        fine = ratio >= least / GRID if ratios is narrow else ratio <= most * GRID
        if not fine:
            row, group = divmod(worst, ratios.shape[1])
            at = f"row {first + row} group {group}"
            return f"{at} has a scale {ratio:.4f} times the one that covers it"
    return ""


def _needed(q: QTensor, value: Tensor) -> Tensor:
    """Compute for law 1 the scale of each group of `value` (out, in) that just covers its largest
    magnitude, in the shape of q's scale."""
    parts = _grouped(q, value)
    if q.scheme.full_range:
        return absmax_scale(value, q.scheme)[0].abs()
    if q.zero_point is None:
        needed = parts.abs().amax(-1) / q.scheme.high
    else:
        reach = parts.amax(-1).clamp(min=0) - parts.amin(-1).clamp(max=0)
        needed = reach / (q.scheme.high - q.scheme.low)
    return needed.clamp(min=FP16_SMALLEST_NORMAL)


def _suspects(name: str, q: QTensor, value: Tensor) -> list[Suspect]:
    """Return the group, the row and the module with the largest and the smallest share <W, Q> / <W,
    W> of their float weight, where that is beyond the screen, and the module if its low bits look
    lost.

    value: float weight W (out, in)
    """
    quantized, parts = _grouped(q, q.dequantize()), _grouped(q, value)
    # weights below the smallest scale are 0 by definition
    tiny = parts.abs().amax(-1) < FP16_SMALLEST_NORMAL * q.scheme.high
    part = (parts * quantized).sum(-1).masked_fill(tiny, 0.0).double()
    whole = parts.square().sum(-1).masked_fill(tiny, 0.0).double()
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
    odd, usual = float((q.integers & 1).float().mean()), _nearest_odd(q, parts)
    if odd < SCREEN.odd * usual:
        message = f"{name}: {odd:.1%} of its integers are odd, {usual:.0%} of the nearest"
        suspects.append(Suspect(name, None, _odd, message, 1))
    return suspects


def _holding(group: int | None, whole: bool) -> Statistic:
    """Return the screen's statistic <W, Q> / <W, W>: of each row, of group number `group` of each
    row, or of all rows together where `whole`."""

    def statistic(q: QTensor | Tensor, value: Tensor, _rows: Tensor) -> Tensor:
        assert isinstance(q, QTensor)
        quantized, parts = _grouped(q, q.dequantize()), _grouped(q, value)
        part, size = (parts * quantized).sum(-1), parts.square().sum(-1)
        if whole:
            return (part.sum() / size.sum().clamp(min=1e-30))[None]
        at = slice(None) if group is None else slice(group, group + 1)
        return part[:, at].sum(1) / size[:, at].sum(1).clamp(min=1e-30)

    return statistic


def _odd(q: QTensor | Tensor, _value: Tensor, _rows: Tensor) -> Tensor:
    assert isinstance(q, QTensor)
    return (q.integers & 1).float().mean()[None]


def _nearest_odd(q: QTensor, parts: Tensor) -> float:
    zero = 0 if q.zero_point is None else q.zero_point[..., None].int()
    nearest = (parts / q.scale[..., None]).round().int() + zero
    return float((nearest & 1).float().mean())


def fold_norm_weight(
    state: CompressedState, source: Mapping[str, Tensor], name: str, family: Family, rotated: bool
) -> Tensor:
    """Compute the expected weight of a norm after folding alone: ones where a rotation folded it
    into the next layer; else the inverse of the factor by which the columns of the module behind it
    were scaled.

    source: parameters of the checkpoint, by name
    rotated: True where the recipe rotates the model
    """
    float_weight = source[name]
    read = (*(p.producer for p in family.smooth), family.final_norm)
    if rotated and any(name.endswith(f".{norm}.weight") for norm in read if norm):
        return torch.ones_like(float_weight)
    for pair in family.smooth:
        suffix = f".{pair.producer}.weight"
        weight = f"{name.removesuffix(suffix)}.{pair.consumers[0]}.weight"
        if name.endswith(suffix) and weight in state.replaced:
            now, before = state.replaced[weight].double(), source[weight].double()
            columns = (now * before).sum(0) / before.square().sum(0).clamp(min=1e-30)
            return (float_weight.double() / columns).float()
    return float_weight


def judge_norm_weights(
    state: CompressedState,
    source: Mapping[str, Tensor],
    family: Family,
    rotated: bool,
    limit: float,
) -> list[str]:
    """Check law 4: return a problem for each learned norm weight that moved further than `limit`
    allows.

    source: parameters of the checkpoint, by name
    rotated: True where the recipe rotates the model
    limit: largest distance, in units of the mean of the weights' magnitudes
    """
    broken = []
    for name in list_learned_norm_weights(state, source):
        folded = fold_norm_weight(state, source, name, family, rotated)
        moved = (state.replaced[name] - folded).abs().max() / folded.abs().mean().clamp(min=1e-30)
        if not float(moved) <= limit:
            shown = write_breach(float(moved), limit)
            broken.append(
                f"{name}: a learned norm weight lies {shown[0]} of their mean from its folded "
                f"value; its steps add up to {shown[1]}"
            )
    return broken


def list_learned_norm_weights(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """List the replaced parameters that a rounding method may have learned: vectors that are not
    biases."""
    return [
        n for n in state.replaced if n.endswith(".weight") and n in source and source[n].ndim == 1
    ]


def equalize_biases(
    state: CompressedState, source: Mapping[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Return {bias: expected value that equalization alone gives it} of the layers that it divided.
    The factor of each output is read from the weights: V / W', with V the checkpoint's weight times
    the factors of its inputs.

    source: parameters of the checkpoint, by name
    """
    factors: dict[str, Tensor] = {}  # of the outputs of the layer before each layer
    biases: dict[str, Tensor] = {}
    for pair in family.equalized:  # in the order in which they run
        name = f"{BODY}.{pair.producer}"
        weight = f"{name}.weight"
        if weight not in state.replaced:
            continue
        now, before = state.replaced[weight].double(), source[weight].double()
        if name in factors:
            groups = len(factors[name]) // before.shape[1]
            before = multiply_inputs(before, factors[name], groups)
        squared, product = (t.flatten(1).sum(1) for t in (before.square(), before * now))
        s = torch.where(product > 0, squared / product, 1.0)
        factors |= {f"{BODY}.{reader}": s for reader in pair.consumers}
        if (bias := f"{name}.bias") in source:
            biases[bias] = divide_outputs(source[bias].double(), s).float()
    return biases


def judge_corrected(corrected: Collection[str], expected: Collection[str]) -> list[str]:
    """Return a problem for each bias that was corrected though the recipe does not ask for it, or
    the reverse.

    corrected: names of the biases that were corrected
    expected: those that the recipe asks for
    """
    missing, extra = sorted({*expected} - {*corrected}), sorted({*corrected} - {*expected})
    return [f"{n}: was not corrected, but the recipe says so" for n in missing] + [
        f"{n}: was corrected, but the recipe does not say so" for n in extra
    ]


def judge_integer_biases(
    state: CompressedState, source: Mapping[str, Tensor], corrections: Mapping[str, Tensor]
) -> dict[str, str]:
    """Check law 3: return {bias of a quantized convolution: sentence on its rounding, or "" where
    it is right}.

    source: parameters of the checkpoint, by name, or biases after equalization
    corrections: {bias: amount added to it}, which bias_correction_laws.py judges
    """
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
        step = compute_bias_step(covered, scale)
        moved = ((value.double() - own.double()).abs() / step).max()
        words[name] = ""
        # half a step, and half a unit of the last place of the sum in float32
        limit = 0.5 + float((own.double().abs() / step).max()) * UNIT["fp32"]
        if not torch.equal(round_bias(value, covered, scale), value):
            words[name] = f"{name}: is not a multiple of its input's step times its weight's step"
        elif not float(moved) <= limit:
            words[name] = (
                f"{name}: lies {float(moved):.4g} steps from the checkpoint's, 0.5 allowed"
            )
    return words


def judge_replaced(state: CompressedState, source: Mapping[str, Tensor]) -> list[str]:
    """Check law 2: return a problem for each parameter that the state replaces and the checkpoint
    lacks, or whose shape differs, or whose values are not finite."""
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
