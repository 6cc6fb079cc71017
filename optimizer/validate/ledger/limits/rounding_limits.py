"""What a rounding method can do to a weight, from how it is defined and the recipe's options.

    nearest   every integer is the nearest one of its scale         rtn, awq, and what goes before
    codes     how far from its weight an integer may lie, in steps, that was the nearest before
    scale     what a scale may be, as a share of what just covers the group's own weights
    norms     how far a learned norm weight may lie from where folding put it

Statistics that no definition bounds (how much of a weight its integers hold, how an output compares
with plain rounding) have no limit here. SCREEN says when a module is looked at more closely: its
suspicious rows are then rounded again by the same method on resampled inputs (resampled.py), and
only that comparison refuses anything.
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
"""Round to nearest: no weight lies further than half a step from its integer, but for the float32
roundings of weight / scale, of at most 128 steps."""

GRID = (1 - UNIT["bf16"]) ** -2
"""A scale is rounded to the bf16 grid, and what it was shrunk or tuned from was before."""


@dataclass(frozen=True)
class Limits:
    """What one method may do. scale: (least, most), as shares of what just covers the group's own
    weights, or of what it started from. norms: see the module's docstring, in units of the mean
    magnitude. codes: of a method that moves integers, see there, in steps of the scale that each
    started from. listed: every scale is one of rtn.candidates, to the bit."""

    scale: tuple[float, float] = (1.0, 1.0)
    norms: float = 0.0
    codes: float = math.inf
    listed: bool = False


UNLIMITED = Limits((0.0, math.inf), math.inf)


@dataclass(frozen=True)
class Rounding:
    """What all methods together may do to a weight. nearest: no integer lies beside the nearest
    one. scale, norms, codes, listed: as of Limits. learned: a method follows gradients through the
    whole block or model: one module rounded again by itself says nothing about it. unjudged: the
    methods whose records say nothing of the integers they choose."""

    nearest: bool
    scale: tuple[float, float]
    learned: bool = False
    norms: float = 0.0
    codes: float = math.inf
    listed: bool = False
    unjudged: tuple[str, ...] = ()

    @property
    def compared(self) -> bool:
        """Whether its outputs are compared with those of plain rounding."""
        return not self.nearest and not self.unjudged


@dataclass(frozen=True)
class Screen:
    """What makes a module's rows worth rounding again; it decides what is looked at, never what is
    refused. share: <W, Q> / <W, W> of a group or row, of the whole module; odd: of the odd integers
    among the nearest ones; output: error by the error of plain rounding, of one output, of the
    module; kept: of |W| |x|, by the most that a pattern of zeros can keep, of a row, of the
    module."""

    share: tuple[float, float] = (0.55, 1.65)
    share_module: tuple[float, float] = (0.85, 1.05)
    odd: float = 0.25
    output: float = 2.0
    output_module: float = 1.25
    kept: float = 0.75
    kept_module: float = 0.85


SCREEN = Screen()


def of(quantize: Quantize, calibrate: Calibrate | None, bits: int) -> Rounding:
    """What the recipe's methods together may do."""
    rounding, tuning = quantize.block_rounding, quantize.of_kind("block-tuning", "model-tuning")
    limits = [
        resolve(m.limits)(quantize, calibrate, bits) if m.limits else UNLIMITED
        for m in (rounding, *tuning)
    ]
    return Rounding(
        nearest=rounding.law == "nearest" and not tuning,
        scale=(math.prod(x.scale[0] for x in limits), math.prod(x.scale[1] for x in limits)),
        learned=any(m.law == "learned" for m in (rounding, *tuning)),
        norms=sum(x.norms for x in limits),
        codes=_codes(rounding.law == "nearest", limits[1:]),
        listed=limits[0].listed and not tuning,
        unjudged=tuple(m.name for m in (rounding, *tuning) if not (m.law and m.limits)),
    )


def alone(bits: int) -> Rounding:
    """Round to nearest by itself."""
    limits = nearest(None, None, bits)
    return Rounding(True, limits.scale, codes=HALF_STEP, listed=limits.listed)


def _codes(nearest: bool, tuning: Sequence[Limits]) -> float:
    """Nothing is known of two methods that move integers one after the other."""
    if not nearest or len(tuning) > 1:
        return math.inf
    return tuning[0].codes if tuning else HALF_STEP


def nearest(_quantize: Quantize | None, _calibrate: Calibrate | None, bits: int) -> Limits:
    """Round to nearest: eight bits are not clipped, fewer are by one of a list of shares."""
    return Limits((1.0 if bits == 8 else min(SHRINKS), 1.0), listed=True)


def clipped(_quantize: Quantize, _calibrate: Calibrate | None, _bits: int) -> Limits:
    """Ranges searched by the output error."""
    return Limits((min(SHRINKS), 1.0))


def gptq(quantize: Quantize, _calibrate: Calibrate | None, _bits: int) -> Limits:
    """Scales within a ratio of what covers a group's own weights."""
    ratio = quantize.gptq.max_scale_ratio
    return Limits((1 / ratio, ratio))


def autoround(quantize: Quantize, _calibrate: Calibrate | None, bits: int) -> Limits:
    """Steps against the sign of a gradient, shrinking linearly to nothing."""
    count, rates = quantize.autoround.steps, rounding_learned.Rates()
    steps = (count + 1) / 2
    # its latent starts between the weight and the nearest integer, moves, and is rounded
    latent = (1 - rounding_learned.OFFSET) / 2 + steps * (rates.integers or 1 / count)
    codes = latent + HALF_STEP + count * 128 * 2.0**-24
    scales = steps * rates.scale_rate(2 ** (bits - 1) - 1)
    return replace(_moved(scales, steps * rates.norm_weights), codes=codes)


def scale_tuning(quantize: Quantize, calibrate: Calibrate | None, _bits: int) -> Limits:
    """Adam moves by at most its rate (Kingma and Ba 2015, section 2.1)."""
    options, rates = quantize.scale_tuning, scales_tuned.Rates()
    windows = options.generated + options.samples
    windows += 0 if calibrate is None else calibrate.samples + calibrate.generated
    per_epoch = math.ceil(windows / options.batch_size)
    steps = (options.epochs * per_epoch + 1) / 2
    return _moved(steps * rates.scales, steps * rates.norm_weights)


def _moved(logarithm: float, norms: float) -> Limits:
    """A scale's logarithm, and a norm weight, moved by so much at most."""
    factor = math.exp(logarithm)
    return Limits((1 / factor, factor), norms)
