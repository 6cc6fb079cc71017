"""Bounds on a rounded weight that follow from how its method is defined and the recipe's options.

    quantize, calibrate, bits -> Rounding: the bounds of all methods of the recipe together

    nearest    every integer is the nearest one of its scale: rtn, awq, and the methods before them
    steps      distance of an integer from its weight, in steps of the scale, where a method moves
               integers that were the nearest before
    scale      ratio of a scale to the one that just covers the group's own weights
    norms      distance of a learned norm weight from its value after folding

Statistics that no definition bounds (the share of a weight that its integers hold, an output's
error over that of round-to-nearest) have no limit here. SCREEN selects modules by them; the
selected rows are rounded again by the same method on resampled inputs (resampled.py), and only that
comparison can refuse a run. Read by state_laws.py and rounding_laws.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optimizer.compress.methods.weights import autoround as rounding_learned
from optimizer.compress.methods.weights import scale_tuning as scales_tuned
from optimizer.compress.methods.weights.rtn import SHRINKS
from optimizer.foundation.references import resolve
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.schema import Calibrate
from optimizer.validate.ledger.pieces.roundoff import UNIT

HALF_STEP = 0.5 + 4 * 128 * 2.0**-24
"""Steps between a weight and its nearest integer, with the float32 rounding of weight / scale,
which is at most 128 steps."""

GRID = (1 - UNIT["bf16"]) ** -2
"""Factor by which two roundings to bf16 may change a ratio: of a scale and of the initial scale."""


@dataclass(frozen=True)
class MethodLimits:
    """Largest deviations that one method may cause; the fields are explained at the top of this
    file."""

    scale: tuple[float, float] = (1.0, 1.0)  # (least, most) ratio to the covering or initial scale
    norms: float = 0.0  # in units of the norm weights' mean magnitude
    steps: float = math.inf  # in steps of the initial scale
    candidates_only: bool = False  # every scale is one of rtn.list_scales, to the bit


UNLIMITED = MethodLimits((0.0, math.inf), math.inf)


@dataclass(frozen=True)
class Rounding:
    """Largest deviations that all methods of a weight may cause together. `scale`, `norms`, `steps`
    and `candidates_only` have the meaning of MethodLimits."""

    nearest: bool  # every integer is the nearest one
    scale: tuple[float, float]
    learned: bool = False  # through a block or the model, so one module cannot be rounded again
    norms: float = 0.0
    steps: float = math.inf
    candidates_only: bool = False
    unjudged: tuple[str, ...] = ()  # methods whose records state no rule or no limits

    @property
    def compared(self) -> bool:
        """True where output errors are compared with the errors of round-to-nearest."""
        return not self.nearest and not self.unjudged


@dataclass(frozen=True)
class Screen:
    """Thresholds of statistics beyond which rows are rounded again. Fields with `_module` are for
    all rows of a module together. No threshold refuses a row by itself."""

    share: tuple[float, float] = (0.55, 1.65)  # <W, Q> / <W, W> of a group or row
    share_module: tuple[float, float] = (0.85, 1.05)
    odd: float = 0.25  # odd integers over odd ones among the nearest integers
    output: float = 2.0  # error of an output over that of round-to-nearest
    output_module: float = 1.25
    kept: float = 0.75  # share of the |W| |x| that the pattern can keep, of a row
    kept_module: float = 0.85


SCREEN = Screen()


def derive_limits(quantize: Quantize, calibrate: Calibrate | None, bits: int) -> Rounding:
    """Derive the bounds of the recipe's methods together, for a weight of `bits` bits."""
    rounding, tuning = quantize.block_rounding, quantize.of_kind("block-tuning", "model-tuning")
    limits = [
        resolve(m.limits)(quantize, calibrate, bits) if m.limits else UNLIMITED
        for m in (rounding, *tuning)
    ]
    return Rounding(
        nearest=rounding.judged_by == "nearest" and not tuning,
        scale=(math.prod(x.scale[0] for x in limits), math.prod(x.scale[1] for x in limits)),
        learned=any(m.judged_by == "learned" for m in (rounding, *tuning)),
        norms=sum(x.norms for x in limits),
        steps=_integer_steps(rounding.judged_by == "nearest", limits[1:]),
        candidates_only=limits[0].candidates_only and not tuning,
        unjudged=tuple(m.name for m in (rounding, *tuning) if not (m.judged_by and m.limits)),
    )


def derive_nearest(bits: int) -> Rounding:
    """Derive the bounds of round-to-nearest to `bits` bits, without another method."""
    limits = nearest(None, None, bits)
    return Rounding(True, limits.scale, steps=HALF_STEP, candidates_only=limits.candidates_only)


def _integer_steps(nearest: bool, tuning: Sequence[MethodLimits]) -> float:
    """Bound a law's integers: return the most steps by which an integer may differ from its weight;
    infinite where the integers are not first rounded to nearest, or where two methods move them.

    nearest: True where they are first rounded to nearest
    tuning: bounds of the methods that move them afterwards
    """
    if not nearest or len(tuning) > 1:
        return math.inf
    return tuning[0].steps if tuning else HALF_STEP


def nearest(_quantize: Quantize | None, _calibrate: Calibrate | None, bits: int) -> MethodLimits:
    """Bounds of round-to-nearest: scales of eight bits cover their weights; scales of fewer bits
    are shrunk by one of SHRINKS."""
    return MethodLimits((1.0 if bits == 8 else min(SHRINKS), 1.0), candidates_only=True)


def clipped(_quantize: Quantize, _calibrate: Calibrate | None, _bits: int) -> MethodLimits:
    """Bounds of the methods that search each scale by the output error: scales between the smallest
    of SHRINKS and 1 times the covering one."""
    return MethodLimits((min(SHRINKS), 1.0))


def gptq(quantize: Quantize, _calibrate: Calibrate | None, _bits: int) -> MethodLimits:
    """Bounds of GPTQ: scales within max_scale_ratio of the covering one."""
    max_scale_ratio = quantize.gptq.max_scale_ratio
    return MethodLimits((1 / max_scale_ratio, max_scale_ratio))


def autoround(quantize: Quantize, _calibrate: Calibrate | None, bits: int) -> MethodLimits:
    """Bounds of AutoRound: steps against the sign of a gradient, which shrink linearly to 0."""
    count, rates = quantize.autoround.steps, rounding_learned.StepSizes()
    steps = (count + 1) / 2
    # the latent starts between the weight and the nearest integer, moves, and is rounded
    latent = (1 - rounding_learned.OFFSET) / 2 + steps * (rates.integers or 1 / count)
    integer_steps = latent + HALF_STEP + count * 128 * 2.0**-24
    scales = steps * rates.scale_rate(2 ** (bits - 1) - 1)
    return replace(_bounds_of_moves(scales, steps * rates.norm_weights), steps=integer_steps)


def scale_tuning(quantize: Quantize, calibrate: Calibrate | None, _bits: int) -> MethodLimits:
    """Bounds of scale tuning: Adam moves by at most its rate (Kingma and Ba 2015, section 2.1)."""
    options, rates = quantize.scale_tuning, scales_tuned.LearningRates()
    windows = options.generated + options.samples
    windows += 0 if calibrate is None else calibrate.samples + calibrate.generated
    per_epoch = math.ceil(windows / options.batch_size)
    steps = (options.epochs * per_epoch + 1) / 2
    return _bounds_of_moves(steps * rates.scales, steps * rates.norm_weights)


def _bounds_of_moves(logarithm: float, norms: float) -> MethodLimits:
    """Convert the largest moves of a training to bounds of a law.

    logarithm: largest change of the logarithm of a scale
    norms: largest change of a norm weight
    """
    factor = math.exp(logarithm)
    return MethodLimits((1 / factor, factor), norms)
