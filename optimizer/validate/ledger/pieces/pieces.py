"""Run a graph's pieces on the tensors that torch computed at the cuts, and judge each alone.

    graph, edges, traces, references -> [JudgedPiece]

    quantizer    float input -> integers, integer by integer (quantizer.py)
    arithmetic   the same integers -> output, element by element (roundoff.py)
    product      where a module's input stays float: input -> output, element by element
    between      linear modules' outputs from torch -> input of the next one, against the distance
                 of correct runs (limits/spread.py)

A flipped integer cannot reach the arithmetic piece, and no error reaches the next module, so a
fault shows at full size in the one piece that has it. Called by the hops export, lower and engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.process import threads
from optimizer.foundation.rounding.tolerance import Squares, compare_lengths, squares
from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort.bound import UNCAPTURED
from optimizer.harness.runtimes.ort.run import OrtRunner, check_names, cores
from optimizer.harness.runtimes.runner import Runner
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.cut import Edge
from optimizer.lower.onnx.graph_source import Source
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.distance import WHOLE, Array
from optimizer.validate.ledger.pieces import layout, quantizer, roundoff
from optimizer.validate.ledger.pieces.quantizer import Judgement, Quantizer, ReferenceIntegers
from optimizer.validate.ledger.pieces.roundoff import ModuleProduct
from optimizer.validate.ledger.trace import Trace

WORST = 3  # elements that a piece names
Key = tuple[str, int]  # (module, index of the use)


@dataclass(frozen=True)
class Element:
    """One element of a piece's output beside its reference, or one wrong integer, for a message of
    the ledger."""

    token: int
    channel: int
    reference: float
    value: float
    bound: float  # allowed difference; for a quantizer the error of `reference`

    @property
    def off(self) -> str:
        """Description of how far the element is from its reference, and of its bound."""
        distance, allowed = write_breach(abs(self.value - self.reference), self.bound)
        return f"{distance} off, {allowed} allowed"

    def as_dict(self) -> dict[str, float]:
        return dict(self.__dict__)


@dataclass(frozen=True)
class JudgedPiece:
    """One part of a graph that was judged alone, with its distance from the reference."""

    module: str
    piece: str  # "quantizer", "arithmetic", "product" or "between"
    ratio: float  # measured over limit; fine up to 1
    limit: str  # the limit in words
    worst: tuple[Element, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    accepts_zeros: bool = False  # its limit lets even zeros pass

    @property
    def fine(self) -> bool:
        """True where the piece is within its limit."""
        return self.ratio <= 1

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "piece": self.piece,
            "ratio": self.ratio,
            "limit": self.limit,
            "worst": [e.as_dict() for e in self.worst],
            "counts": dict(self.counts),
        }

    @property
    def problem(self) -> str:
        """Sentence on how far the piece exceeds its limit, for the ledger's problems."""
        at, times = self.worst[0] if self.worst else None, write_breach(self.ratio, 1.0)[0]
        if self.piece == "quantizer":
            sentence = f"{self.counts['wrong']} of {self.counts['elements']} integers are wrong"
            if not self.counts["wrong"]:
                sentence = (
                    f"{self.counts['flips']} of {self.counts['near_ties']} values near a tie got "
                    f"the other integer, rounding explains {self.counts['flips_allowed']} at most"
                )
            return f"{self.module}: {sentence}" + (
                f", the first {at.value:.0f} for {at.reference:.4f}" if at else ""
            )
        if self.piece == "between":
            return f"{self.module}: the part before it is {times} times {self.limit}"
        return f"{self.module}: its output is {times} times as far off as rounding allows" + (
            f" (channel {at.channel}: {at.value:.9g} for {at.reference:.9g}, {at.off})"
            if at
            else ""
        )


@dataclass(frozen=True)
class Linear:
    """Reference of a linear module of a graph: how its input is quantized, and its product with the
    weight."""

    quantizer: Quantizer | None  # reference of its input; None where that stays float
    read: Callable[[], ModuleProduct]  # function that reads its product's weight

    @property
    def product(self) -> ModuleProduct:
        return self.read()


@dataclass(frozen=True)
class Opener:
    """A way to open a graph or a piece of one in a runtime.

    open: function file -> context that provides a runner
    behind_quantizers: True where kernels use integers only behind a quantizing operator. A product
        is then run with its quantizer, on the float in the middle of each integer, which rounds to
        that integer only
    """

    open: Callable[[Path], AbstractContextManager[Any]]
    behind_quantizers: bool = False


class GraphRunner(OrtRunner):
    """Runner of a graph or a piece of one, whose KV cache may be empty. It raises an error of ONNX
    Runtime during a run as HarnessError, so a damaged graph fails its hop and not the complete
    proof."""

    def _check(self, arrays: Mapping[str, Array]) -> None:
        check_names(set(arrays), set(self.inputs), self.model.name)

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        with _refusals(self.model):
            return super().infer(arrays)

    def run_bound(self, binding: Any, graph: int = UNCAPTURED) -> None:
        with _refusals(self.model):
            super().run_bound(binding, graph)


AS_WRITTEN = Opener(lambda model: GraphRunner(model, threads=1, fuse=False, mapped=True))
"""In ONNX Runtime, operator by operator as the file has them."""
FUSED = Opener(lambda model: GraphRunner(model, threads=1, fuse=True))
"""In ONNX Runtime's fused kernels."""
FUSED_FLOAT = Opener(lambda model: GraphRunner(model, threads=1, fuse=True, mapped=True))
"""In ONNX Runtime's fused kernels, for a float graph, whose weights are left in their file."""


def change_opener(opener: Opener, matrices: Mapping[str, Array]) -> Opener:
    """Return an opener of a graph whose adapter matrices are given (OrtRunner.adapted); `opener`
    itself where there are none.

    matrices: {input: matrix} of the adapter
    """
    if not matrices:
        return opener
    return replace(opener, open=lambda model: opener.open(model).adapted(matrices))  # type: ignore[attr-defined]


@contextmanager
def _refusals(model: Path) -> Iterator[None]:
    try:
        yield
    except HarnessError:
        raise
    except Exception as e:  # the binding raises a dozen unrelated classes
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise HarnessError(f"it cannot be run ({first[:200]})", where=str(model)) from None


def number_uses(at: Sequence[Edge]) -> list[tuple[Edge, Key]]:
    """Return a judged graph's [(edge, (module, use))]; use counts the edges of one module, as in a
    Trace."""
    seen: dict[str, int] = {}
    keys = []
    for edge in at:
        use = seen[edge.module] = seen.get(edge.module, -1) + 1
        keys.append((edge, (edge.module, use)))
    return keys


def judge_quantizers(
    model: Source,
    at: Sequence[Edge],
    traces: Sequence[Trace],
    linear: Callable[[str], Linear],
    work: Path,
    opener: Opener,
) -> list[JudgedPiece]:
    """Run the quantizers of a graph alone and return a JudgedPiece for each quantized tensor, named
    after the first module that reads it.

    model: the graph
    at: edges of the modules to judge
    traces: traces of the torch model, whose inputs of modules are used
    linear: function module -> reference
    work: empty folder for the cut graph
    opener: runtime that runs it
    """
    uses = list(
        {e.integers: (e, key) for e, key in reversed(number_uses(at)) if e.integers}.values()
    )
    if not uses:
        return []
    piece = work / "quantizers.onnx"
    cut.write_quantizers(model, [e for e, _ in uses], piece)
    judged: dict[str, list[Judgement]] = {}
    worst: dict[str, Element] = {}
    with opener.open(piece) as runner:
        for inputs, real in _inputs(uses, traces, linear):
            arrays = cast_inputs(
                runner,
                {e.input: layout.shape_input(inputs[e.input], e.input_rank) for e, _ in uses},
            )
            out = runner.infer(arrays)
            for edge, (module, _) in uses:
                q = linear(module).quantizer
                assert q is not None
                x = arrays[edge.input]
                rows = x.reshape(-1, x.shape[-1])
                reference = quantizer.compute_reference(rows, q)
                integers, padding = layout.remove_padding(out[edge.integers], edge.sides)
                integers = integers.reshape(rows.shape)
                judgement = quantizer.judge(integers, reference, q, count_flips=real)
                if padding.size and (padding != quantizer.quantize_zero(q)).any():
                    judgement = replace(judgement, wrong=judgement.wrong + padding.size)
                judged.setdefault(edge.integers, []).append(judgement)
                if judgement.at and edge.integers not in worst:
                    worst[edge.integers] = _integer(judgement.at[0], integers, reference)
    return [
        _quantizer_piece(key[0], judged[e.integers], worst.get(e.integers))
        for e, key in reversed(uses)
    ]


def _integer(at: tuple[int, int], integers: Array, reference: ReferenceIntegers) -> Element:
    real, delta = float(reference.real[at]), float(reference.delta[at])
    return Element(at[0], at[1], real, float(integers[at]), delta)


def _quantizer_piece(module: str, judged: list[Judgement], worst: Element | None) -> JudgedPiece:
    whole = quantizer.merge(judged)
    limit = "every integer the reference's, but one step beside rounding ties"
    at = () if worst is None else (worst,)
    return JudgedPiece(module, "quantizer", whole.ratio, limit, at, whole.counts)


def _inputs(
    uses: Sequence[tuple[Edge, Key]], traces: Sequence[Trace], linear: Callable[[str], Linear]
) -> Iterator[tuple[dict[str, Array], bool]]:
    """Yield the inputs on which quantizers are judged: ({input: array}, True) for every trace, of
    which values near a tie are counted; then ({input: array}, False) with the probes of each
    quantizer (quantizer.list_probes)."""
    for trace in (t for t in traces if not t.past):  # a continuation has the same tokens
        yield {e.input: trace.inputs[key] for e, key in uses}, True
    probes: dict[str, list[Array]] = {}
    for edge, key in uses:
        q, width = linear(key[0]).quantizer, traces[0].inputs[key].shape[-1]
        assert q is not None
        probes.setdefault(edge.input, []).append(quantizer.list_probes(q, width))
    joined = {name: np.concatenate(rows) for name, rows in probes.items()}
    fixed = _fixed_shapes(uses, traces)
    free = {n: rows for n, rows in joined.items() if n not in fixed}
    most = max(map(len, free.values()), default=1)  # a graph has one length for all its tensors
    shapes = {e.input: _fixed_dimensions(traces[0], key) or (most,) for e, key in uses}
    # one batch size for all that holds each tensor's probes
    count = max((-(-len(rows) // math.prod(shapes[n])) for n, rows in free.items()), default=1)
    arrays = {n: np.resize(rows, (count, *shapes[n], rows.shape[1])) for n, rows in free.items()}
    room = {name: math.prod(shape[:-1]) for name, shape in fixed.items()}
    for run in range(max((-(-len(joined[n]) // rows) for n, rows in room.items()), default=1)):
        for name, shape in fixed.items():
            at = range(run * room[name], (run + 1) * room[name])
            arrays[name] = joined[name].take(at, axis=0, mode="wrap").reshape(shape)
        yield dict(arrays), False


def _fixed_shapes(
    uses: Sequence[tuple[Edge, Key]], traces: Sequence[Trace]
) -> dict[str, tuple[int, ...]]:
    """Return {input: shape} of the inputs that have one shape in all traces. A model computes such
    inputs, as relative positions, from its parameters alone, and the graph accepts no other shape.
    """
    shapes = {e.input: {t.inputs[key].shape for t in traces if not t.past} for e, key in uses}
    return {name: next(iter(each)) for name, each in shapes.items() if len(each) == 1}


def _fixed_dimensions(trace: Trace, key: Key) -> tuple[int, ...]:
    """Return the dimensions of an input between its first and its last, where the graph accepts no
    others: those of an input without padding. () where it accepts any."""
    array = trace.inputs[key]
    fixed = trace.mask.ndim == 1 or array.ndim > 3  # images, or attention probabilities
    return array.shape[1:-1] if fixed and array.ndim > 2 else ()


def judge_products(
    model: Source,
    at: Sequence[Edge],
    traces: Sequence[Trace],
    linear: Callable[[str], Linear],
    work: Path,
    opener: Opener,
) -> list[JudgedPiece]:
    """Run the linear modules of a graph alone and return a JudgedPiece for each: `arithmetic` from
    integers to the output, or `product` where the input stays float. The arguments are those of
    judge_quantizers."""
    keys = {id(edge): key for edge, key in number_uses(at)}
    at = [edge for edge in at if edge.multiplies]
    piece = work / "products.onnx"
    inputs = layout.give_middles if opener.behind_quantizers else layout.give_integers
    worst: dict[str, list[tuple[float, Element]]] = {e.module: [] for e in at}
    for part in cut.split(at):
        cut.write_products(model, part, piece, quantizers=opener.behind_quantizers)
        uses = [(edge, keys[id(edge)]) for edge in part]
        with opener.open(piece) as runner:
            for module, far in _multiply(runner, uses, traces, linear, inputs):
                worst[module] += far
    return [_product_piece(module, far, linear(module)) for module, far in worst.items()]


def _multiply(
    runner: Runner,
    uses: Sequence[tuple[Edge, Key]],
    traces: Sequence[Trace],
    linear: Callable[[str], Linear],
    inputs: layout.Inputs,
) -> Iterator[tuple[str, list[tuple[float, Element]]]]:
    """Yield (module, its furthest elements) of each use and trace. The runner takes one call at a
    time, so it computes the next trace while this one is judged.

    inputs: function of layout.py that makes a piece's inputs
    """

    def run(trace: Trace) -> tuple[dict[Key, roundoff.Floats], dict[str, Array]]:
        batch: dict[str, Array] = {}
        multiplied: dict[Key, roundoff.Floats] = {}
        for edge, key in uses:
            kind = runner.inputs.get(edge.input)
            arrays, multiplied[key] = inputs(
                edge, trace.inputs[key], linear(key[0]).quantizer, kind
            )
            batch |= arrays
        return multiplied, runner.infer(batch)

    for multiplied, out in threads.map_in_threads(run, (t for t in traces if not t.past), 1):

        def judge(
            use: tuple[Edge, Key],
            multiplied: Mapping[Key, roundoff.Floats] = multiplied,
            out: Mapping[str, Array] = out,
        ) -> tuple[str, list[tuple[float, Element]]]:
            (edge, key), product = use, linear(use[1][0]).product
            return key[0], find_furthest(
                multiplied[key], product.outputs(out[edge.output]), product
            )

        yield from threads.map_in_threads(judge, uses, cores())


def find_furthest(
    x: roundoff.Floats, output: Array, product: ModuleProduct, inputs: roundoff.Floats | None = None
) -> list[tuple[float, Element]]:
    """Return (|error| / bound, element) of the WORST elements of an output.

    x: values that the module multiplies, (tokens, in) or images
    output: output of the graph
    inputs: further error (tokens, out) that the module's inputs may cause; None: none
    """
    far: list[tuple[float, Element]] = []
    for part, exact, bound in roundoff.compute_parts(x, product):
        if inputs is not None:
            bound = bound + inputs[:, part]
        value = output[:, part].astype(np.float64)
        ratio = roundoff.compute_ratio(value, exact, bound)
        flat = ratio.ravel()
        for index in np.argpartition(flat, -min(WORST, flat.size))[-WORST:]:
            t, c = divmod(int(index), ratio.shape[1])
            element = Element(
                t, part.start + c, float(exact[t, c]), float(value[t, c]), float(bound[t, c])
            )
            far.append((float(flat[index]), element))
    return sorted(far, key=lambda f: -f[0])[:WORST]


def _product_piece(module: str, far: list[tuple[float, Element]], linear: Linear) -> JudgedPiece:
    far = sorted(far, key=lambda f: -f[0])[:WORST]
    name = "product" if linear.quantizer is None else "arithmetic"
    elements = tuple(e for _, e in far)
    return JudgedPiece(module, name, far[0][0] if far else 0.0, linear.product.limit, elements)


def judge_between(
    model: Source,
    at: Sequence[Edge],
    traces: Sequence[Trace],
    limits: Mapping[str, float],
    work: Path,
    opener: Opener,
) -> list[JudgedPiece]:
    """Run the operators before each linear module and before each output, a decoder's KV cache
    included, on torch's outputs of linear modules, and return a JudgedPiece for each.

    limits: {"<module>:input:<use>" or name of an output: limit of the distance}

    The other arguments are those of judge_quantizers.
    """
    piece = work / "rest.onnx"
    if not cut.write_rest(model, at, piece):
        return []
    apart: dict[str, list[Squares]] = {}
    with opener.open(piece) as runner:

        def compare(trace: Trace) -> dict[str, list[Squares]]:
            cuts = {
                e.output: layout.place_output(trace.outputs[key], e) for e, key in number_uses(at)
            }
            out = runner.infer(cast_inputs(runner, {**trace.batch, **cuts}))
            out |= {e.input: layout.read_back(out[e.input], e) for e in at if e.input in out}
            targets = {
                f"{m}:input:{u}": (e.input, trace.inputs[m, u]) for e, (m, u) in number_uses(at)
            }
            targets |= {name: (name, expected) for name, expected in trace.result.items()}
            return {
                label: [squares(f, e) for f, e in trace.pairs(out[name], expected)]
                for label, (name, expected) in targets.items()
                if name in out  # else a module that reads another's output, or a model's input
            }

        for each in threads.map_in_threads(compare, traces, cores()):
            for label, of_trace in each.items():
                apart.setdefault(label, []).extend(of_trace)
    return [
        JudgedPiece(
            label.removesuffix(":0"),
            "between",
            max(compare_lengths(each), default=0.0) / limits[label],
            f"{limits[label]:.3g}, the limit that correct runs set",
            accepts_zeros=limits[label] >= WHOLE,
        )
        for label, each in apart.items()
    ]


def cast_inputs(runner: Runner, arrays: dict[str, Array]) -> dict[str, Array]:
    """Return {input of the judged piece: array in the type that it reads}, without arrays that it
    does not read."""
    types = runner.inputs
    return {
        name: arrays[name].astype(kind) if kind is not None else arrays[name]
        for name, kind in types.items()
    }


def run_graph(
    model: Path, traces: Sequence[Trace], names: Collection[str], opener: Opener
) -> Iterator[dict[str, Array]]:
    """Run a judged graph on each trace and yield {output: float32 array}, as run_each. One trace
    per core runs at a time, because the session has one thread.

    names: outputs to return
    """
    with opener.open(model) as runner:
        yield from threads.map_in_threads(lambda one: _run(runner, one, names), traces, cores())


def run_each(
    runner: Runner, traces: Sequence[Trace], names: Collection[str]
) -> Iterator[dict[str, Array]]:
    """Run each trace and yield {output: float32 array} of the outputs `names`. The arrays are
    copies: an output of the session is a view that would keep the session's memory, weights
    included."""
    return (_run(runner, one, names) for one in traces)


def _run(runner: Runner, one: Trace, names: Collection[str]) -> dict[str, Array]:
    result = runner.infer(cast_inputs(runner, dict(one.batch)))
    return {n: np.array(result[n], np.float32) for n in names}
