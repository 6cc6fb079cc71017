"""Check weights that reduce adjusted, against the optimality of least squares.

An adjusted weight minimizes, over the calibration text,

    J(V, b') = sum over tokens |V x + b' - W f - b|^2 + d |V - W_k|^2

V, b': the adjusted weight and bias; W, b: the reference's; W_k: the kept columns of W; x, f: the
layer's inputs in the smaller model and in the float model with the same blocks; d: damping.

compared   J(V, b') and J(W_k, b), computed here from the two models side by side: the minimum is
           not larger, for any model and data. With second_order this holds per output, since each
           is a problem of its own
limit      float32 rounding of the products, u sqrt(n) |x| |w| each (Higham & Mary 2019), twice in
           a square
caught     a weight adjusted too far, another output's adjusted bias: test_a_planted_fault_is_named
caller     structure_laws.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.reduce.methods.least_squares import DAMPING
from optimizer.validate.ledger import trace
from optimizer.validate.materials import Materials

Document = Mapping[str, Any]
UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8}
SMALL = 1e-300  # divisor for a column of zeros


class Objective:
    """Running sums by which a law judges a reduced layer: J is computed at its adjusted weight and
    at the reference's kept columns."""

    def __init__(self, adjusted: Tensor, start: Tensor, weight: Tensor, moved: Tensor) -> None:
        """Start with no inputs.

        adjusted: adjusted weight V (out, kept)
        start: reference's kept columns W_k (out, kept)
        weight: reference's weight W (out, in)
        moved: difference of the biases b' - b (out,)
        """
        self.moved = moved.float()
        self.stored = float(torch.finfo(adjusted.dtype).eps)
        self.V, self.start, self.weight = adjusted.float(), start.float(), weight.float()
        self.gain = torch.zeros(len(weight), dtype=torch.float64)  # of V over W_k, per output
        self.squares = torch.zeros(start.shape[1], dtype=torch.float64)
        self.sums, self.tokens = torch.zeros_like(self.squares), 0
        self.lengths = torch.zeros(3, dtype=torch.float64)  # sums of |x|^2, |x| |f|, |f|^2

    def add(self, x: Tensor, f: Tensor) -> None:
        """Add inputs of the layer.

        x: (tokens, kept), in the smaller model
        f: (tokens, in), in the float model
        """
        target = f @ self.weight.T
        before = (x @ self.start.T - target).double()
        after = (x @ self.V.T + self.moved - target).double()
        self.gain += before.square().sum(0) - after.square().sum(0)
        self.squares += x.double().square().sum(0)
        self.sums += x.double().sum(0)
        self.tokens += len(x)
        a, b = x.double().norm(dim=1), f.double().norm(dim=1)
        self.lengths += torch.stack([a @ a, a @ b, b @ b])

    def problem(self, importance: str, unit: float) -> str:
        """Return a sentence where J is larger at V than at W_k by more than rounding explains, else
        "".

        importance: method that adjusted the weight
        unit: unit roundoff of the products, or of the stored weight
        """
        start, moved = self.start.double(), (self.V - self.start).double()
        xx, xf, ff = self.lengths.tolist()
        a = torch.maximum(self.V.double().norm(dim=1), start.norm(dim=1))
        b = self.weight.double().norm(dim=1)
        size = a.square() * xx + 2 * a * b * xf + b.square() * ff
        slack = 4 * unit * self.weight.shape[1] ** 0.5 * size
        squares = self.squares
        if bool(self.moved.any()):  # about the mean, which the bias compensates
            squares = squares - self.sums.square() / max(self.tokens, 1)
        gain = self.gain - DAMPING * squares.mean() * moved.square().sum(1)
        if importance == "fisher":  # one factor per column, for all outputs together
            norms = start.square().sum(0)
            factor = (self.V.double() * start).sum(0) / norms.clamp(min=SMALL)
            pull = DAMPING * (norms * squares).mean() * (factor - 1).square().sum()
            gain, slack = (self.gain.sum() - pull)[None], slack.sum()[None]
        worse = gain < -slack
        if not bool(worse.any()):
            return ""
        rows = worse.nonzero().reshape(-1)[:3].tolist()
        return (
            "errs more on the calibration text than the reference's own columns do; weights that "
            f"{importance} adjusts never do ({int(worse.sum())} of {len(gain)}, first {rows})"
        )


def find_problems(
    m: Materials, document: Document, objectives: Mapping[str, Objective]
) -> Iterator[str]:
    """Yield sentences on adjusted weights that are not optimal, in the order of computation. A
    wrong weight changes the inputs of later layers, so the first sentence names the cause.

    document: content of reduced.json
    objectives: {adjusted weight of the smaller model: empty objective}, in the order of computation
    """
    if not objectives:
        return
    calibrate = m.section.reduce.calibrate if m.section.reduce else None
    layers = {name: name.removesuffix(".weight") for name in objectives}
    with _without(m, [layer["of"] for layer in document["layers"]]) as reference:
        for batch in m.calibration(calibrate or m.section.calibrate):
            entered = _entered(m.smaller_model, batch, layers.values())
            floats = _entered(reference, batch, layers.values())
            for name, objective in objectives.items():
                for x, f in zip(entered[layers[name]], floats[layers[name]], strict=True):
                    objective.add(x, f)
    for name, objective in objectives.items():
        unit = max(objective.stored, UNIT[document["precision"]])
        if wrong := objective.problem(document["importance"], unit):
            yield f"{name}: {wrong}"


def _entered(model: nn.Module, batch: Any, layers: Any) -> dict[str, list[Tensor]]:
    """Run a batch for the law and return the inputs of adjusted layers, {layer: [(tokens, in) of
    each call]}."""
    inputs: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    trace.observe(model, batch, list(inputs), lambda name, rows: inputs[name].append(rows))
    return inputs


@contextmanager
def _without(m: Materials, kept: list[str]) -> Iterator[nn.Module]:
    """Provide the law's reference model without the removed blocks, so that its blocks are numbered
    as the smaller model's.

    kept: names of the blocks to keep
    """
    model = m.reference_model
    path = f"{m.family.prefix(m.task)}{m.family.blocks}"
    parent, _, attribute = path.rpartition(".")
    holder, blocks = model.get_submodule(parent), model.get_submodule(path)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == len(kept):
        yield model
        return
    setattr(holder, attribute, nn.ModuleList(model.get_submodule(name) for name in kept))
    try:
        yield model
    finally:
        setattr(holder, attribute, blocks)
