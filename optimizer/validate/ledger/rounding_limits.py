"""What a rounding method can do to a weight, from how it is defined and the recipe's options.

    nearest   every integer is the nearest one of its scale         rtn, awq, and what goes before
    scale     what a scale may be, as a share of what just covers the group's own weights
    gains     how far a learned norm weight may lie from where folding put it

Statistics that no definition bounds (how much of a weight its integers hold, how an output compares
with plain rounding) have no limit here. SCREEN says when a module is looked at more closely: its
suspicious rows are then rounded again by the same method on resampled inputs (resampled.py), and
only that comparison refuses anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optimizer.compress.methods import autoround, scale_tuning
from optimizer.compress.methods.rtn import SHRINKS
from optimizer.recipe.quantize import Quantize
from optimizer.recipe.schema import Calibrate
from optimizer.validate.ledger.roundoff import UNIT

LEARNED = {"autoround", "scale_tuning"}
"""Methods that follow gradients through the whole block or model: one module rounded again by
itself says nothing about them."""

HALF_STEP = 0.5 + 4 * 128 * 2.0**-24
"""Round to nearest: no weight lies further than half a step from its integer, but for the float32
roundings of weight / scale, of at most 128 steps."""

GRID = (1 - UNIT["bf16"]) ** -2
"""A scale is rounded to the bf16 grid, and what it was shrunk or tuned from was before."""


@dataclass(frozen=True)
class Rounding:
    """nearest: no integer lies beside the nearest one. scale: (least, most). learned: in LEARNED.
    gains: see the module's docstring, in units of the mean magnitude. listed: every scale is one of
    rtn.candidates, to the bit."""

    nearest: bool
    scale: tuple[float, float]
    learned: bool = False
    gains: float = 0.0
    listed: bool = False


@dataclass(frozen=True)
class Screen:
    """What makes a module's rows worth rounding again; it decides what is looked at, never what is
    refused. held: <W, Q> / <W, W> of a group or row, of the whole module; odd: of the odd integers
    among the nearest ones; output: error by the error of plain rounding, of one output, of the
    module."""

    held: tuple[float, float] = (0.55, 1.65)
    held_module: tuple[float, float] = (0.85, 1.05)
    odd: float = 0.25
    output: float = 2.0
    output_module: float = 1.25


SCREEN = Screen()


def nearest(bits: int) -> Rounding:
    """Round to nearest by itself."""
    return Rounding(True, (1.0 if bits == 8 else min(SHRINKS), 1.0), listed=True)


def of(quantize: Quantize, calibrate: Calibrate | None, bits: int) -> Rounding:
    """What the recipe's methods together may do."""
    methods = quantize.rounders
    clips = bits < 8 or ("awq" in quantize.transforms and quantize.awq.clip)
    least, most = (min(SHRINKS) if clips else 1.0), 1.0
    if "gptq" in methods:
        least, most = 1 / quantize.gptq.max_scale_ratio, quantize.gptq.max_scale_ratio
    moved, gains = 0.0, 0.0
    if "autoround" in methods:
        # Steps against the sign of a gradient, shrinking linearly to nothing.
        steps, rates = (quantize.autoround.steps + 1) / 2, autoround.Rates()
        moved, gains = moved + steps * rates.scales, gains + steps * rates.gains
    if "scale_tuning" in methods:
        # Adam moves by at most its rate (Kingma and Ba 2015, section 2.1).
        windows = quantize.scale_tuning.generated + (
            0 if calibrate is None else calibrate.samples + calibrate.generated
        )
        per_epoch = math.ceil(windows / quantize.scale_tuning.batch_size)
        steps, rate = (quantize.scale_tuning.epochs * per_epoch + 1) / 2, scale_tuning.Rates()
        moved, gains = moved + steps * rate.scales, gains + steps * rate.gains
    factor = math.exp(moved)
    learned = bool(LEARNED & set(methods))
    plain = not ({"gptq"} & set(methods)) and not learned
    listed = plain and "awq" not in quantize.transforms
    return Rounding(plain, (least / factor, most * factor), learned, gains, listed)
