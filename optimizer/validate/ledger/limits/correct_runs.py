"""Limits from correct runs of this model on a sample of the ledger's inputs and its longest text.

    LedgerSamples, models -> CorrectRuns -> Spread: {output: limit}

Every limit on a distance end to end, or between two linear modules, is one of these. The runs of
one model in one arithmetic are made once, and stay on disk: monte_carlo.py makes them, spread.py
derives the limit. Made by materials.py, read by the hops and by the laws of decoders and training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
from torch import nn

from optimizer.foundation.rounding.random_rounding import Arithmetic
from optimizer.foundation.rounding.tolerance import RUNS, lengths, upper_bound
from optimizer.harness.inputs.batch import Batch
from optimizer.lower.onnx import cut
from optimizer.validate.ledger.array_file import ArrayFile, LazyArrays
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.limits import monte_carlo, spread
from optimizer.validate.ledger.limits.spread import Run, Spread
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.ledger.trace import Trace

RUNS_ALONE = 32  # of one example: their bound is about as tight as that of a sample's few runs
NEAR_TOKENS = 32  # likeliest tokens, among which rounding may change the choice


@dataclass(frozen=True)
class LedgerSamples:
    """The ledger's batches, and the sample on which graphs are cut and correct runs are made."""

    batches: Sequence[Batch]  # the usual batches
    extremes: Sequence[Batch]  # [many rows, the longest text]; correct runs read the last
    sampled: Sequence[int]  # indices in `batches` of the sample
    outputs: Sequence[str]  # names of the contract's outputs
    compared: Sequence[str]  # names of a graph's outputs, a decoder's KV cache included
    continues: bool  # a decoder's graph also runs on the end of a text after a KV cache
    scratch: Path | None  # folder for arrays on disk; None: the folder for temporary files
    by_column: dict[Path, bool] = field(default_factory=dict)  # cut.GraphSummary's, of graphs read

    def looks(self, *, extremes: bool = True) -> int:
        """Return the number of comparisons of each output with its limit.

        extremes: True to count the extreme batches too
        """
        chosen = (*self.batches, *self.extremes) if extremes else self.batches
        return 2 * sum(b.rows for b in chosen)

    def continuations(
        self, traces: Sequence[Trace], model: Path
    ) -> tuple[list[Trace], list[tuple[int, int]]]:
        """Return (continuations of traces, [(index of the continued trace, past)]). A continuation
        has the tokens from number `past` on as inputs, behind a KV cache of the first `past`
        tokens.

        Continued are a decoder's first trace, and the second, which is padded, where the graph
        `model` accepts torch's KV cache of it.
        """
        if not self.continues:
            return list(traces), []
        if model not in self.by_column:
            self.by_column[model] = cut.summarize(model).by_column
        by_column = self.by_column[model]
        read = [replace(t, by_column=by_column) for t in traces]
        lengths = [(i, read[i].mask.shape[1]) for i in range(min(len(read), 1 if by_column else 2))]
        return read, [(i, past) for i, n in lengths for past in (n // 3, n - 1) if 0 < past < n]

    def with_continuations(self, traces: Sequence[Trace], model: Path) -> list[Trace]:
        """Return all traces that the graph `model` runs end to end: `traces` and their
        continuations."""
        read, cuts = self.continuations(traces, model)
        return [*read, *(read[i].continued(past) for i, past in cuts)]

    def of_pieces(self, traces: Sequence[Trace], model: Path) -> list[Trace]:
        """Return the recorded inputs on which pieces of the ONNX graph are compared: the sampled
        traces, and of decoders their next steps with a filled KV cache.

        model: path of the graph
        """
        return self.with_continuations([traces[i] for i in self.sampled], model)


@dataclass(frozen=True)
class TorchModel:
    """A torch model that correct runs are made of. Its parts are functions, because models and
    traces are as large as the weights: they are made at their first use and freed after their last
    hop."""

    model: Callable[[], nn.Module]
    traces: Callable[[], Sequence[Trace]]  # of the usual batches
    extremes: Callable[[], Sequence[Trace]]  # traces of the extreme batches
    modules: Callable[[], Sequence[str]]  # linear modules, and residual adds that read integers
    graph: Path  # the ONNX file that is compared with the model


@dataclass(frozen=True)
class _ComparedTrace:
    """A trace of the sample, and the place in a run of the outputs that are compared with it."""

    trace: Trace
    batch: int  # index of the batch in the run
    past: int  # first token of the part


class CorrectRuns:
    """Limits from correct runs. Runs are made when a limit is first read, and kept on disk.

    samples: the ledger's batches and the sample of them
    models: {"folded": the float model with replaced parameters, "state": the compressed state}
    arithmetic: function Materials.arithmetic
    """

    def __init__(
        self,
        samples: LedgerSamples,
        models: Mapping[str, TorchModel],
        arithmetic: Callable[..., Arithmetic],
    ) -> None:
        self._samples, self._models, self.arithmetic = samples, models, arithmetic
        self._file = ArrayFile(samples.scratch)
        self._cached: dict[tuple[str, Arithmetic | str], list[list[Mapping[str, Array]]]] = {}
        self._module_inputs: dict[tuple[str, str], dict[str, float]] = {}

    def source_outputs(self) -> Spread:
        """Limits of the float model's outputs, as loaded or folded, on the usual inputs only: the
        hops that use them never run the longest text, whose limit is looser."""
        arithmetic = self.arithmetic("fp32", "folded")
        return self._spread("folded", arithmetic, self._samples.outputs, extremes=False)

    def graph_outputs(self, kind: str, precision: str) -> Spread:
        """Return the limits of a graph's outputs, from correct runs of the model that the graph
        computes.

        kind: model: "folded" (float graph) or "state" (lowered graph)
        precision: float type of the graph
        """
        return self._spread(kind, self.arithmetic(precision, kind), self._samples.compared)

    def kernel_quantization(self) -> Spread:
        """Limits of the distance between the state with float inputs and the state in fused
        kernels, which quantize their inputs."""
        return self._spread(
            "state",
            self.arithmetic("fp32"),
            self._samples.compared,
            self.arithmetic("fp32", blocks=True),
        )

    def kernel_outputs(self) -> Spread:
        """Return the limits of the outputs of an engine whose fused kernels quantize their inputs
        themselves, from correct runs."""
        return self._spread("state", self.arithmetic("fp32", blocks=True), self._samples.compared)

    def token_logits(self, precision: str, *, blocks: bool) -> Spread:
        """Return the limit of a decoder's "logits", where each token is an example.

        precision: type of float operators
        blocks: True for fused kernels
        """
        runs = self._token_runs(precision, blocks)
        traces = self._traces_from_the_start()
        rows = [[_by_token(r, one) for r, one in zip(run, traces, strict=True)] for run in runs]
        by_token = []
        for one in traces:
            logits = one.result["logits"][one.mask.astype(bool)][:, None]
            by_token.append(Trace(np.ones(logits.shape[:2], np.int64), {}, {"logits": logits}))
        looks = 8 * sum(int(b.real.sum()) for b in self._samples.batches)
        return spread.measure_spread(rows, None, by_token, ["logits"], UNIT["fp32"], looks)

    def token_gap(self, looks: int, precision: str, *, blocks: bool) -> float:
        """Return the largest gap to the likeliest token, in standard deviations of the logits, at
        which a correct run may draw another token: the most by which two runs move two of the
        likeliest tokens apart.

        looks: number of tokens that are compared with the gap
        precision: type of float operators
        blocks: True for fused kernels
        """
        runs = self._token_runs(precision, blocks)
        traces = self._traces_from_the_start()
        widest = []
        for i, first in enumerate(runs):
            for second in runs[i + 1 :]:
                for a, b, one in zip(first, second, traces, strict=True):
                    keep = one.mask.astype(bool)
                    widest += _widest(a["logits"][keep], b["logits"][keep])
        independent = len(widest) // max(RUNS - 1, 1)
        return upper_bound(widest, independent, looks, UNIT["fp32"])

    def module_inputs(self, kind: str, precision: str) -> dict[str, float]:
        """Return the limits of the operators between linear modules, where each module returns the
        outputs in the traces: {"<module>:input:<use>" or name of an output: limit}.

        kind: "folded" or "state"
        precision: type of float operators
        """
        if (kind, precision) not in self._module_inputs:
            self._module_inputs[kind, precision] = self._measure_between(kind, precision)
        return self._module_inputs[kind, precision]

    def _measure_between(self, kind: str, precision: str) -> dict[str, float]:
        parts = [p for p in self._parts(kind, extremes=False) if not p.past]
        traces = [p.trace for p in parts]
        arithmetic = self.arithmetic(precision)
        file = ArrayFile(self._samples.scratch)
        rounded = monte_carlo.RoundedModel(self._models[kind].model(), (), arithmetic)
        compared = self._samples.compared
        runs = list(monte_carlo.run_between(rounded, traces, compared, range(RUNS), file.put))
        names = list(runs[0][0])
        labelled = [_with_inputs(t, names) for t in traces]
        looks = self._samples.looks()
        return dict(
            spread.measure_spread(runs, None, labelled, names, arithmetic.unit, looks).limits
        )

    def _token_runs(self, precision: str, blocks: bool) -> list[list[Mapping[str, Array]]]:
        arithmetic, state = self.arithmetic(precision, blocks=blocks), self._models["state"]
        if monte_carlo.flips_values(state.model(), state.modules(), arithmetic):
            arithmetic = replace(arithmetic, flips="token")  # else the runs of graph_outputs serve
        return self._runs("state", arithmetic)

    def _traces_from_the_start(self) -> list[Trace]:
        return [p.trace for p in self._parts("state") if not p.past]

    def _parts(self, kind: str, *, extremes: bool = True) -> list[_ComparedTrace]:
        """List the parts of correct runs to compare.

        extremes: True to include the longest text, which graphs run end to end only
        """
        model = self._models[kind]
        traces = model.traces()
        chosen = [traces[i] for i in self._samples.sampled]
        if extremes:
            chosen += model.extremes()[-1:]
        chosen, cuts = self._samples.continuations(chosen, model.graph)
        complete = [_ComparedTrace(t, i, 0) for i, t in enumerate(chosen)]
        return complete + [_ComparedTrace(chosen[i].continued(past), i, past) for i, past in cuts]

    def _runs(self, kind: str, arithmetic: Arithmetic) -> list[list[Mapping[str, Array]]]:
        key = (kind, _describe(arithmetic))
        if key not in self._cached:
            s, model = self._samples, self._models[kind]
            batches = [*(s.batches[i] for i in s.sampled), *s.extremes[-1:]]
            rounded = monte_carlo.RoundedModel(model.model(), model.modules(), arithmetic)
            seeds = _seeds(key, RUNS)
            runs = monte_carlo.make_runs(rounded, batches, s.compared, seeds, self._file.put)
            self._cached[key] = list(runs)
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
        parts = self._parts(kind, extremes=extremes)
        first = [_select(run, parts) for run in self._runs(kind, arithmetic)]
        second = None
        if other is not None:
            second = [_select(run, parts) for run in self._runs(kind, other)]
        traces, looks = [p.trace for p in parts], self._samples.looks(extremes=extremes)
        measured = spread.measure_spread(first, second, traces, list(names), arithmetic.unit, looks)
        kinds = (arithmetic,) if other is None else (arithmetic, other)
        looks *= len(list(names))
        return replace(measured, limit_alone=partial(self._limit_alone, kind, kinds, looks))

    def _limit_alone(
        self,
        kind: str,
        kinds: Sequence[Arithmetic],
        looks: int,
        one: Trace,
        name: str,
        usual: float,
    ) -> float:
        """Return the limit of output `name` of one example, from RUNS_ALONE correct runs of it.

        kinds: arithmetic of the runs; two where runs of one kind are compared with runs of the
            other
        one: trace of the example
        looks: number of comparisons of all outputs
        usual: mean square of the output's values in all examples
        """
        runs = [self._runs_alone(kind, arithmetic, one, name) for arithmetic in kinds]
        pairs = product(*runs) if len(runs) > 1 else combinations(runs[0], 2)
        apart = [d for a, b in pairs for d in lengths(one.pairs(a, b), usual)]
        return upper_bound(apart, RUNS_ALONE // 2, looks, kinds[0].unit)

    def _runs_alone(self, kind: str, arithmetic: Arithmetic, one: Trace, name: str) -> list[Array]:
        model = self._models[kind]
        rounded = monte_carlo.RoundedModel(model.model(), model.modules(), arithmetic)
        seeds = _seeds((kind, _describe(arithmetic)), RUNS_ALONE)
        runs = monte_carlo.make_runs(rounded, [one.complete_batch], [name], seeds)
        return [_from_token(run[0], one.past)[name] for run in runs]


def _describe(arithmetic: Arithmetic) -> str:
    return repr(replace(arithmetic, replaced={}, shifts={})) + (
        " folding" if arithmetic.replaced else ""
    )


def _seeds(key: tuple[str, Arithmetic | str], count: int) -> range:
    """Return the seeds of the random rounding of `count` runs. They follow from `key`, the kind of
    run, so that a run can be repeated."""
    first = 1000 * (sum(map(ord, str(key))) % 1000)
    return range(first, first + count)


def _select(run: Run, parts: Sequence[_ComparedTrace]) -> list[Mapping[str, Array]]:
    """Return {output: array} of each part of a correct run: the tokens from number `past` on; of a
    KV cache all tokens."""
    return [_from_token(run[p.batch], p.past) for p in parts]


def _from_token(result: Mapping[str, Array], past: int) -> Mapping[str, Array]:
    def read(name: str) -> Array:
        array = result[name]
        return array[:, past:] if past and array.ndim == 3 else array

    return LazyArrays(result.keys(), read)


def _by_token(result: Mapping[str, Array], one: Trace) -> Mapping[str, Array]:
    """Return {"logits": (real tokens, 1, vocabulary)} of a correct run, so that each token is an
    example."""
    real = one.mask.astype(bool)
    return LazyArrays(["logits"], lambda name: result[name][real][:, None])


def _with_inputs(one: Trace, names: Sequence[str]) -> Trace:
    """Return the trace with the outputs or inputs of modules `names` as the results that are
    compared."""
    inputs = {f"{m}:input:{use}": array for (m, use), array in one.inputs.items()}
    results = {**one.result, **inputs}
    return replace(one, result={n: results[n] for n in names})


def _widest(a: Array, b: Array) -> list[float]:
    """Return, per token, the most that two of the likeliest tokens move apart between two correct
    runs, in standard deviations of the logits.

    a, b: logits (tokens, vocabulary) of the runs
    """
    likeliest = np.argpartition(a, -min(NEAR_TOKENS, a.shape[1]), axis=1)[:, -NEAR_TOKENS:]
    moved = np.take_along_axis(a.astype(np.float64) - b.astype(np.float64), likeliest, 1)
    return list((moved.max(1) - moved.min(1)) / a.astype(np.float64).std(1))
