"""Check bias corrections against the mean output error on the calibration texts.

compared   each correction that compress added to a bias, and the mean output that quantization
           removes in the finished model, without clipping
           (compress/apply/weights/bias_correction.py)
limit      measured in the same run: the upper tolerance bound, over all modules, of the difference
           of that error between float and quantized inputs
caught     all corrections, or one, with the wrong sign:
           test_one_bias_corrected_the_wrong_way_is_caught_at_compress
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from optimizer.compress.simulate import fake_quantize, quantize_tokens
from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.rounding.tolerance import normal_bound
from optimizer.foundation.state import PER_TOKEN, CompressedState, weight_name
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.laws.calibration_laws import (
    COMMON,
    FINISHED,
    FLOAT,
    Findings,
    SharedInputs,
    compute_integer_ends,
)

SAME = 2.0**-20
"""Relative difference below which two means of float32 values are of the same values: sixteen
roundoffs."""


class BiasCorrectionLaw:
    """Compare each corrected bias of a state with the mean error that quantization makes.

    state: the compressed state
    source: parameters of the checkpoint, by name
    corrections: {bias: amount added to it}, (outputs,)
    filters: function from a module's name to its convolution's geometry, None for others
    """

    def __init__(
        self,
        state: CompressedState,
        source: Mapping[str, Tensor],
        corrections: Mapping[str, Tensor],
        filters: Callable[[str], ConvGeometry | None],
    ) -> None:
        self._state, self._source, self._corrections = state, source, corrections
        self.modules = tuple(name.removesuffix(".bias") for name in corrections)
        self._readers = SharedInputs(state, self.modules, {m: filters(m) for m in self.modules})
        self._seen = [{m: _Mean() for m in self.modules} for _ in range(3)]

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        if not self._readers.collects(module, rows):
            return
        factor, covered = self._readers.factors[module], self._readers.ranges[module]
        x = rows if factor is None else rows * factor
        coded = x
        if self._state.activations in PER_TOKEN:
            coded = quantize_tokens(x, self._state.activations)
        elif covered is not None:
            low, high = (end * covered.scale for end in compute_integer_ends(covered))
            x, coded = x.clamp(low, high), fake_quantize(x, covered)
        filters = self._readers.filters[module]
        if filters is not None:
            x, coded = filters.mean_patch(x), filters.mean_patch(coded)
        for kind in kinds:
            self._seen[kind][module].update(x, coded)

    def findings(self) -> Findings:
        for seen in self._seen:
            seen.update({m: seen[first] for m, first in self._readers.first.items()})
        moved = [
            _relative(self._lost(FLOAT, module), self._lost(COMMON, module))
            for module in self.modules
            if self._input_moved(module)
        ]
        limit = normal_bound(moved, len(self.modules))
        wrong = []
        for module in self.modules:
            stored = self._corrections[f"{module}.bias"].double()
            far = _relative(stored, self._lost(FINISHED, module))
            if not far <= limit:
                shown = write_breach(far, limit)
                message = (
                    f"{module}.bias: its correction lies {shown[0]} of its size from the mean "
                    f"output error on the calibration texts; between float and quantized inputs "
                    f"that error differs by up to {shown[1]}"
                )
                wrong.append((far, message))
        count = len(self.modules)
        reason = f"{count} bias corrections, too few to measure how quantization moves them"
        return Findings(
            [message for _, message in sorted(wrong, reverse=True)],
            [] if math.isfinite(limit) else [reason],
        )

    def doubtful(self) -> Sequence[str]:
        return ()  # a mean over all tokens depends on no single batch

    def _input_moved(self, module: str) -> bool:
        """True where quantization before this module moved its mean inputs by more than SAME."""
        floats, quantized = self._seen[FLOAT][module].exact, self._seen[COMMON][module].exact
        return _relative(floats, quantized) > SAME

    def _lost(self, kind: int, module: str) -> Tensor:
        """Return the mean float output less the mean quantized output of a module on the same
        inputs, (outputs,) float64. Both are linear in the inputs, so mean inputs suffice.

        kind: one of the kinds of inputs of calibration_laws.py
        """
        weight, seen = weight_name(module), self._seen[kind][module]
        exact = self._state.replaced.get(weight, self._source[weight]).double().flatten(1)
        factor = self._readers.factors[module]
        if factor is not None:
            exact = exact / factor.double()
        quantized = self._state.weights[weight].dequantize().double()
        filters = self._readers.filters[module]
        if filters is not None:
            return filters.apply_to_patch(exact, seen.exact) - filters.apply_to_patch(
                quantized, seen.coded
            )
        return exact @ seen.exact - quantized @ seen.coded


class _Mean:
    """Running means over tokens of the inputs of a module, for the law: before they are quantized
    (`exact`), and after."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor] | None = None
        self._count = 0

    def update(self, exact: Tensor, coded: Tensor) -> None:
        sums = exact.sum(0, dtype=torch.float64), coded.sum(0, dtype=torch.float64)
        before = self._sums
        self._sums = sums if before is None else (before[0] + sums[0], before[1] + sums[1])
        self._count += len(exact)

    @property
    def exact(self) -> Tensor:
        assert self._sums is not None
        return self._sums[0] / max(self._count, 1)

    @property
    def coded(self) -> Tensor:
        assert self._sums is not None
        return self._sums[1] / max(self._count, 1)


def _relative(a: Tensor, b: Tensor) -> float:
    """Compute the law's distance |a - b| / max(|a|, |b|) of two vectors; 0 where both are 0."""
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0
