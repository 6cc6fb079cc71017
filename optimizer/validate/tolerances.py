"""What each hop may change, declared before anything is measured, with the reason.

All are relative L2 distances. A hop that runs quantized activations end to end has no small
tolerance: a value that float rounding moves across a rounding tie changes a code by one step,
and later layers multiply such flips until they are a share of the quantization error itself.
So those hops are proven piece by piece (lower/cut.py), each piece given the reference's own
inputs, where only float rounding is left; the end-to-end distance of every example of every output
is bounded by a share of the quantization error of that example, or of that output where that is
more, and is there to catch wrong wiring.

Pieces cannot be cut out of an engine that runs on a GPU. With quantized activations its hop is
therefore judged end to end only, and its entry says so (UNCUT). The share is not tightened: a
difference of d steps before a coding is one of sqrt(d) after it in the mean square, so that flips
grow layer by layer to where two codings of a value are independent. Each is off by 1/sqrt(12)
step, so they are sqrt(2) times the activations' part of the quantization error apart; the
share of 1 of the whole error is below that where activations are most of it.

Limits that a change of precision explains are derived in precisions.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.validate.precisions import limit


@dataclass(frozen=True)
class Tolerance:
    """limit: relative L2. share: of the measured quantization error, added to it (judged.py)."""

    limit: float
    why: str
    share: float = 0.0

    def at(self, quantization_error: float) -> float:
        """Of a state that is not finitely far from the float model nothing is forgiven."""
        finite = math.isfinite(quantization_error)
        return self.limit + (self.share * quantization_error if finite else 0.0)


UNCUT = (
    "judged end to end only: pieces of an engine cannot be run alone, and the limit is wide enough "
    "to hide one module's fault"
)
"""What the entry and the gate of such a hop say."""

FLIPS = "codes flip at rounding ties, and the flips add up to less than the quantization error"

TABLE: dict[str, Tolerance] = {
    "load": Tolerance(
        0.0, "transformers' own loader and ours run the same operators on the same values"
    ),
    "fold": Tolerance(1e-5, "a scale folded into two neighbours cancels up to float32 rounding"),
    "fold rotated": Tolerance(
        1e-4,
        "every weight is multiplied by an orthogonal matrix and stored in float32 again: eps 6e-8 "
        "x sqrt(inputs) for each of the products that a rotation runs through",
    ),
    "export fp32": Tolerance(
        limit("fp32", "fp32", "whole"),
        "the same operators in another order: eps 6e-8 x sqrt(about 4,000 roundings along a path)",
    ),
    "export fp16": Tolerance(
        limit("fp32", "fp16", "whole"),
        "eps 4.9e-4 x sqrt(about 400 roundings that do not average out inside a sum)",
    ),
    "piece fp32": Tolerance(
        limit("fp32", "fp32", "piece"),
        "one linear module or the few operators between two: eps 6e-8 x sqrt(inputs) x margin",
    ),
    "piece int8 fp32": Tolerance(
        limit("int8", "int8 fp32", "piece"),
        "integer sums are exact; an int32 bias is rounded to a step of input scale x weight scale, "
        "of three tokens in four at least (a tie flips a code in the others)",
    ),
    "piece fp16": Tolerance(
        limit("fp32", "fp16", "piece"), "eps 4.9e-4 of inputs, weights and sum, x margin"
    ),
    "piece int8 fp16": Tolerance(
        limit("int8", "int8 fp16", "piece"),
        "fp16 inputs lie up to 2^-11 from the reference's: a code in twenty flips by one step",
    ),
    "lower fp32 float": Tolerance(
        1e-4, "the weights are the state's exactly; activations stay float: rounding only"
    ),
    "lower fp32 int8": Tolerance(1e-4, FLIPS, share=1.0),
    "lower fp16 float": Tolerance(
        limit("fp32", "fp16", "whole"), "as the float16 graph from torch"
    ),
    "lower fp16 int8": Tolerance(limit("fp32", "fp16", "whole"), FLIPS, share=1.0),
    "engine fp32 int8": Tolerance(1e-4, FLIPS, share=1.0),
    "engine fp16 int8": Tolerance(limit("fp32", "fp16", "whole"), FLIPS, share=1.0),
    "engine fp32 float": Tolerance(
        1e-4,
        "weights are the same codes and products stay fp32 (ONNX Runtime is told use_tf32: 0, the "
        "TensorRT builder's TF32 flag is cleared): sums in another order, through every block",
    ),
    "engine fp16 float": Tolerance(
        limit("int4", "int4 fp16", "whole"),
        "the same codes and operators in kernels of another order: as the float16 graph",
    ),
    "engine blocks": Tolerance(
        limit("int4", "int4 int8", "piece"),
        "for 4- and 8-bit weights alone MatMulNBits codes its float inputs to int8 in blocks: "
        "absmax/rms of a block (at most sqrt(128)) / (127 sqrt(12)) = 2.6e-2 per module",
    ),
    "cache float": Tolerance(
        1e-4,
        "the same sums over the same numbers in another order, through every block: as the float "
        "graph from torch, a position at a time",
    ),
    "cache coded": Tolerance(1e-4, FLIPS, share=1.0),
    "answers": Tolerance(
        2e-6, "pooling and normalization in float32, once in numpy and once in torch"
    ),
    "harness": Tolerance(0.0, "the same code on the same file must give the same bits"),
}

TIE = 1e-3
CODED_TIE = 0.25
"""Deviations of the logits between two tokens that may be exchanged: by rounding, or by the codes
of activations that it flips. Two runs whose flips have nothing in common lie sqrt(2) times as far
apart as either from the exact one (SmolLM2 with its inputs in 8-bit blocks: 0.03 of the logits),
the gap of two tokens sqrt(2) times that, and the widest of a few dozen goes to 3 such deviations
(measured there: 0.11 of 12 texts)."""

WEIGHT_STEPS = 0.5
"""Round to nearest: no weight lies further than half a step from its code (and a hair)."""

SCALE_SLACK = 1 + 2.0**-7
"""A weight scale is within this factor of what was chosen: the grid rounds by 2^-9."""

NARROWEST_SCALE = {8: 1.0, 4: 0.6, 3: 0.6}
"""By bits, the share of absmax / highest code that a scale may be shrunk to (compress/rtn.py);
an eight-bit scale just covers its group."""


@dataclass(frozen=True)
class Projected:
    """The least and the most of a float weight W that the values Q of its codes hold,
    <W, Q> / <W, W>: of a whole module, of each output, of each group. Least squares on noisy inputs
    shrinks; nothing makes a module larger than it was."""

    module: tuple[float, float]
    row: tuple[float, float]
    group: tuple[float, float]


@dataclass(frozen=True)
class Rounding:
    """What a rounder must keep. nearest: no code lies beside the nearest one. scale: (narrowest,
    widest) scale as a share of what its group of the float weight needs; None where
    NARROWEST_SCALE and SCALE_SLACK say it. clipped: (narrowest, largest share of saturated
    codes) of a group a few of whose weights are clipped further. projected: by bits, see
    Projected. aim: (module, row) of
    rounding_laws.py."""

    nearest: bool
    scale: tuple[float, float] | None = None
    clipped: tuple[float, float] | None = None
    projected: Mapping[int, Projected] | None = None
    aim: tuple[float, float] = (1.0, 1.0)


CLIPPED = (0.33, 0.08)
USUAL = Projected(module=(0.85, 1.05), row=(0.55, 1.25), group=(0.55, 1.65))
PROJECTED = {8: USUAL, 4: USUAL, 3: Projected((0.65, 1.05), (0.5, 1.25), (0.0, 1.65))}
"""SmolLM2 by GPTQ in groups of 64: 0.92 to 1.003, 0.72 to 1.05 and 0.58 to 1.48 in 4 bits, 0.77 to
1.007, 0.70 to 1.07 and 0.37 to 1.58 in 3; less in smaller groups."""
LEAST_ODD = 0.25
"""Of the odd codes among the nearest ones: half of all are odd unless low bits are lost."""

LEARNING = {"autoround", "distill"}  # rounders that move norm gains as well

ROUNDING = {
    "rtn": Rounding(nearest=True),
    # Scales fit the weight that makes up for earlier errors, which lies beside the float one. The
    # outputs are better than rounding's on the texts it saw, and hardly worse on others.
    # A group's largest weight is clipped to a third where it meets an input that hardly matters
    # (of 1.6 million groups of SmolLM2 three lie between 0.45 and 0.5, with at most 5 codes of 64
    # at the ends).
    "gptq": Rounding(
        nearest=False, scale=(0.5, 3.0), clipped=CLIPPED, projected=PROJECTED, aim=(1.25, 2.0)
    ),
    # Also trades one module's outputs for its block's, or for the model's.
    "autoround": Rounding(
        nearest=False, scale=(0.5, 3.0), clipped=CLIPPED, projected=PROJECTED, aim=(1.5, 3.0)
    ),
    "distill": Rounding(
        nearest=False, scale=(0.5, 3.0), clipped=CLIPPED, projected=PROJECTED, aim=(1.5, 3.0)
    ),
}

RANGE_DRIFT = 1.5
"""A range is what its method gives on the calibration texts; that the finished model's own
quantized activations are looked at, not the walk's, moves it by a few percent."""

ZERO_POINT_DRIFT = 24
"""Likewise of 256 codes."""

GAIN_DRIFT = 0.25
"""A learned norm gain moves by steps of 5e-4 of the gains' mean, a few hundred of them, shrinking
to nothing."""
