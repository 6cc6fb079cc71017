"""Correct runs of this model on a few of the ledger's inputs and on its longest, made once, and the
limits they give.

Every limit on a distance end to end, or between two linear modules, is one of these: see
monte_carlo.py for how the runs are made and spread.py for how a limit follows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from optimizer.foundation.rounding.random_rounding import Arithmetic, RandomRounding
from optimizer.validate.ledger.array_file import ArrayFile, Lazily
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.limits import monte_carlo, spread
from optimizer.validate.ledger.limits.spread import RUNS, Run, Spread
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.ledger.trace import Trace

if TYPE_CHECKING:
    from optimizer.validate.materials import Materials

NEAR_TOKENS = 32  # among which rounding may choose another token than the likeliest


@dataclass(frozen=True)
class _Sample:
    """A trace of the sample, and the batch whose run holds it, from its token `past` on."""

    trace: Trace
    batch: int
    past: int


class CorrectRuns:
    """materials: whose torch models are run. The kinds of model: "folded" in float, "state"."""

    def __init__(self, materials: Materials) -> None:
        self._m = materials
        self._file = ArrayFile(materials.scratch)
        self._cached: dict[tuple[str, Arithmetic | str], list[list[Mapping[str, Array]]]] = {}
        self._between: dict[tuple[str, str], dict[str, float]] = {}

    @property
    def examples(self) -> int:
        """How many of each output are held against a limit."""
        return 2 * sum(b.rows for b in (*self._m.batches, *self._m.extremes))

    def arithmetic(self, precision: str, kind: str = "state", blocks: bool = False) -> Arithmetic:
        """blocks: as fused kernels of weight-only modules, which quantize their inputs.

        Parameters that methods folded were computed in float32 beforehand, by a rotation from as
        many terms as they have inputs.
        """
        m = self._m
        rotated = bool(m.section.quantize.of_kind("model-transform"))
        growth = {
            name: float(np.sqrt(m.state.replaced[name].shape[-1])) if rotated else 2.0
            for name in m.state.replaced
            if kind == "folded" and name not in m.state.pruned_floats
        }
        kernels = m.kernel_blocks if blocks else {}
        shifts = m.offset_biases if kind == "state" and precision != "fp32" else {}
        return Arithmetic(unit=UNIT[precision], blocks=kernels, replaced=growth, shifts=shifts)

    def source(self) -> Spread:
        """Of the float model's outputs, as loaded or folded, on the usual inputs: what is compared
        under it is never run on the longest text, whose limit is looser."""
        arithmetic = self.arithmetic("fp32", "folded")
        return self._spread("folded", arithmetic, self._m.outputs, extremes=False)

    def whole(self, kind: str, precision: str) -> Spread:
        """Of all outputs of a graph that runs float operators in `precision`."""
        return self._spread(kind, self.arithmetic(precision, kind), self._m.compared)

    def blocks(self) -> Spread:
        """Between the state with float inputs and as fused kernels run it, which quantize them."""
        return self._spread(
            "state",
            self.arithmetic("fp32"),
            self._m.compared,
            self.arithmetic("fp32", blocks=True),
        )

    def kernels(self) -> Spread:
        """Of outputs as fused kernels compute them, which quantize inputs by themselves."""
        return self._spread("state", self.arithmetic("fp32", blocks=True), self._m.compared)

    def tokens(self, precision: str, *, blocks: bool) -> Spread:
        """Of a decoder's logits, token by token."""
        runs = self._token_runs(precision, blocks)
        samples = [s for s in self._samples("state") if not s.past]
        traces = [s.trace for s in samples]
        rows = [[_by_token(r, one) for r, one in zip(run, traces, strict=True)] for run in runs]
        by_token = []
        for one in traces:
            logits = one.result["logits"][one.mask.astype(bool)][:, None]
            by_token.append(Trace(np.ones(logits.shape[:2], np.int64), {}, {"logits": logits}))
        looks = 8 * sum(int(b.real.sum()) for b in self._m.batches)
        return spread.spread(rows, None, by_token, ["logits"], UNIT["fp32"], looks)

    def gap(self, looks: int, precision: str, *, blocks: bool) -> float:
        """How far below the likeliest token one may lie that a correct run prefers, in deviations
        of the logits: the most that two runs move two of the likeliest tokens apart."""
        runs = self._token_runs(precision, blocks)
        traces = [s.trace for s in self._samples("state") if not s.past]
        widest = []
        for i, first in enumerate(runs):
            for second in runs[i + 1 :]:
                for a, b, one in zip(first, second, traces, strict=True):
                    keep = one.mask.astype(bool)
                    widest += _widest(a["logits"][keep], b["logits"][keep])
        independent = len(widest) // max(RUNS - 1, 1)
        return spread.upper_bound(widest, independent, looks, UNIT["fp32"])

    def between(self, kind: str, precision: str) -> dict[str, float]:
        """{"<module>:input:<use>" or output: limit} of what lies between linear modules, these
        answering exactly what the traces say."""
        if (kind, precision) not in self._between:
            self._between[kind, precision] = self._between_limits(kind, precision)
        return self._between[kind, precision]

    def _between_limits(self, kind: str, precision: str) -> dict[str, float]:
        samples = [s for s in self._samples(kind, extremes=False) if not s.past]
        traces = [s.trace for s in samples]
        arithmetic = self.arithmetic(precision)
        file = ArrayFile(self._m.scratch)
        between = monte_carlo.between(
            self._model(kind), traces, self._m.compared, arithmetic, RUNS, seed=1
        )
        runs = [[file.put(result) for result in run] for run in between]
        names = list(runs[0][0])
        labelled = [_with_inputs(t, names) for t in traces]
        return dict(
            spread.spread(runs, None, labelled, names, arithmetic.unit, self.examples).limits
        )

    def _token_runs(self, precision: str, blocks: bool) -> list[list[Mapping[str, Array]]]:
        arithmetic = self.arithmetic(precision, blocks=blocks)
        return self._runs("state", replace(arithmetic, flips="token"))

    def _model(self, kind: str) -> nn.Module:
        return self._m.folded_model if kind == "folded" else self._m.simulated_model

    def sampled(self, traces: Sequence[Trace], model: Path) -> list[Trace]:
        """What a graph is asked piece by piece: the sample of the traces, and its continuations."""
        return self._m.with_continuations([traces[i] for i in self._m.sampled], model)

    def _samples(self, kind: str, *, extremes: bool = True) -> list[_Sample]:
        """extremes: include the longest text, which is judged whole only."""
        m = self._m
        traces = m.folded_traces if kind == "folded" else m.simulated_traces
        chosen = [traces[i] for i in self._m.sampled]
        if extremes:
            chosen += (m.folded_extremes if kind == "folded" else m.simulated_extremes)[-1:]
        path = m.graph / "model.onnx" if kind == "folded" else m.model / "model.onnx"
        chosen, cuts = m.continuations(chosen, path)
        whole = [_Sample(t, i, 0) for i, t in enumerate(chosen)]
        return whole + [_Sample(chosen[i].continued(past), i, past) for i, past in cuts]

    def _runs(self, kind: str, arithmetic: Arithmetic) -> list[list[Mapping[str, Array]]]:
        key = (kind, _named(arithmetic))
        if key not in self._cached:
            m = self._m
            batches = [*(m.batches[i] for i in m.sampled), *m.extremes[-1:]]
            rounding = RandomRounding(arithmetic, _seed(key))
            modules = [*m.modules, *(m.state.summands if kind == "state" else ())]
            runs = monte_carlo.runs(self._model(kind), batches, m.compared, modules, rounding, RUNS)
            self._cached[key] = [[self._file.put(result) for result in run] for run in runs]
        return self._cached[key]

    def _spread(
        self,
        kind: str,
        arithmetic: Arithmetic,
        names: Sequence[str],
        other: Arithmetic | None = None,
        *,
        extremes: bool = True,
    ) -> Spread:
        samples = self._samples(kind, extremes=extremes)
        first = [_views(run, samples) for run in self._runs(kind, arithmetic)]
        second = None
        if other is not None:
            second = [_views(run, samples) for run in self._runs(kind, other)]
        traces = [s.trace for s in samples]
        looks = self.examples if extremes else 2 * sum(b.rows for b in self._m.batches)
        return spread.spread(first, second, traces, list(names), arithmetic.unit, looks)


def _named(arithmetic: Arithmetic) -> str:
    return repr(replace(arithmetic, replaced={}, shifts={})) + (
        " folding" if arithmetic.replaced else ""
    )


def _seed(key: tuple[str, Arithmetic | str]) -> int:
    return sum(map(ord, str(key))) % 1000


def _views(run: Run, samples: Sequence[_Sample]) -> list[Mapping[str, Array]]:
    """What a sample's trace is compared with: outputs from its token `past` on; a cache whole."""
    return [_view(run[s.batch], s.past) for s in samples]


def _view(result: Mapping[str, Array], past: int) -> Mapping[str, Array]:
    def read(name: str) -> Array:
        array = result[name]
        return array[:, past:] if past and array.ndim == 3 else array

    return Lazily(result.keys(), read)


def _by_token(result: Mapping[str, Array], one: Trace) -> Mapping[str, Array]:
    """(real tokens, 1, vocabulary) logits."""
    real = one.mask.astype(bool)
    return Lazily(["logits"], lambda name: result[name][real][:, None])


def _with_inputs(one: Trace, names: Sequence[str]) -> Trace:
    """The trace with its modules' inputs among its results."""
    inputs = {f"{m}:input:{use}": array for (m, use), array in one.inputs.items()}
    known = {**one.result, **inputs}
    return replace(one, result={n: known[n] for n in names})


def _widest(a: Array, b: Array) -> list[float]:
    """Per token (tokens, vocabulary): the most that the likeliest tokens move against each other,
    in deviations."""
    likeliest = np.argpartition(a, -min(NEAR_TOKENS, a.shape[1]), axis=1)[:, -NEAR_TOKENS:]
    moved = np.take_along_axis(a.astype(np.float64) - b.astype(np.float64), likeliest, 1)
    return list((moved.max(1) - moved.min(1)) / a.astype(np.float64).std(1))
