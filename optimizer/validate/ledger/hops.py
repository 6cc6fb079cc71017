"""The hops of the ledger that all targets share, one function each: Materials -> LedgerEntry.

ledger.py lists what each hop compares. Limits come from limits/ (outputs, rounding methods) and
pieces/ (parts of a graph).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimizer.compress.apply.activations.activation_ranges import (
    OF_CACHES,
    OF_OPERANDS,
    PROBABILITIES,
)
from optimizer.compress.apply.weights.rounding import uses_float_target
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import owner_of
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.graph_source import open_graph
from optimizer.model.architectures.operands import is_probabilities, select_operands
from optimizer.model.checkpoint.cache_operands import install_operands
from optimizer.model.checkpoint.model import copy_module, load_torch_model
from optimizer.model.graph import record
from optimizer.validate import target_runner
from optimizer.validate.ledger import bisect, trace
from optimizer.validate.ledger.breach import BUDGET, write_breach
from optimizer.validate.ledger.distance import Distance, measure_distance
from optimizer.validate.ledger.entry import HopOutputs, LedgerEntry, make_entry
from optimizer.validate.ledger.laws import (
    answer_laws,
    batch_norm_laws,
    bias_correction_laws,
    calibration_laws,
    contract_laws,
    graph_laws,
    range_laws,
    rounding_laws,
    sparsity_laws,
    state_laws,
    tensor_laws,
)
from optimizer.validate.ledger.laws.images import detector_laws
from optimizer.validate.ledger.laws.rows import claim_laws, span_laws
from optimizer.validate.ledger.limits import resampled, rounding_limits
from optimizer.validate.ledger.pieces import linears, pieces
from optimizer.validate.materials import Materials

UNCUT = (
    "judged end to end only: pieces of an engine cannot be run alone, and correct runs lie far "
    "enough apart to hide one module's fault"
)
"""Sentence in the entry and the gate of an engine on another device than the CPU."""
COARSER = (
    "its pieces are judged in fp32, where an integer differs from rounding; in the type that "
    "it runs in, end to end only"
)
HIDDEN = (
    "the kernel quantizes its inputs internally, where integers cannot be read: the bound of its "
    "products includes that, and `lower` proves the graph as written"
)


def load(m: Materials) -> LedgerEntry:
    """Hop `load`: compare our model with transformers' own, and parameters with the file."""
    from safetensors import safe_open

    folder, problems = m.source / "checkpoint", list[str]()
    if of_file := record.is_graph(folder):
        results = _original_outputs(m)
    else:
        original = m.load_by_transformers()
        results = [trace.run(original, b, m.outputs) for b in m.batches]
    every, computed = dict(m.float_model.named_parameters()), m.checkpoint.tensors.computed
    if m.family.batch_norms is not None and not of_file:
        problems += batch_norm_laws.compare_folded(original, every, m.family.batch_norms)
    ours = {n: p for n, p in every.items() if n not in computed}

    def stored(name: str, file: Any) -> Tensor:
        tensor: Tensor = file.get_tensor(name)
        return m.checkpoint.tensors.as_stored(name, tensor)

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            problems += [
                f"{name} differs from the file"
                for name in f.keys()  # noqa: SIM118 - a safetensors handle is not a mapping
                if name in ours and not bool((ours[name] == stored(name, f).float()).all())
            ]
    measured = m.output_distance(results, m.float_traces)
    why = "the same operators on the same values give the same bits"
    start = "ONNX Runtime on original/model.onnx" if of_file else "transformers"
    if measured.worst == 0:
        return LedgerEntry("load", start, 0.0, measured, not problems, why, tuple(problems))
    # on some processors the bits depend on the address of the values
    spread = m.correct.source_outputs()
    return make_entry("load", start, HopOutputs(results, m.float_traces, spread), problems)


def _original_outputs(m: Materials) -> list[dict[str, Any]]:
    """Run the user's ONNX file for hop `load` without fusions; one row at a time where it accepts
    no more."""
    path, single = m.source / "original" / "model.onnx", m.checkpoint.config["single"]
    with OrtRunner(path, threads=1, fuse=False) as runner:
        results = []
        for batch in m.batches:
            starts = range(0, batch.rows, 1 if single else batch.rows)
            size = 1 if single else batch.rows
            parts = [runner.infer({n: a[i : i + size] for n, a in batch.items()}) for i in starts]
            results.append({n: np.concatenate([p[n] for p in parts]) for n in m.outputs})
    return results


def fold(m: Materials) -> LedgerEntry:
    """Hop `fold`: compare the float model with replaced parameters with the source, whose outputs
    it must keep. Corrected biases and learned norm weights change them and have separate laws."""
    quantize = m.section.quantize
    rotated = any(x.folds_norms == "away" for x in quantize.chosen)
    problems = state_laws.judge_replaced(m.state, m.parameters)
    learned = {}
    # with quantized inputs none is learned (compress/apply/weights/autoround.py)
    if quantize.activations is None and any(x.learns_norms for x in quantize.chosen):
        limit = rounding_limits.derive_limits(quantize, m.section.calibrate, 8).norms
        problems += state_laws.judge_norm_weights(m.state, m.parameters, m.family, rotated, limit)
        learned = {
            name: state_laws.fold_norm_weight(m.state, m.parameters, name, m.family, rotated)
            for name in state_laws.list_learned_norm_weights(m.state, m.parameters)
        }
    divides = any(x.folds_biases for x in quantize.chosen)
    equalized = state_laws.equalize_biases(m.state, m.parameters, m.family) if divides else {}
    biases = ChainMap(equalized, m.parameters)
    integer_biases = state_laws.judge_integer_biases(m.state, biases, m.corrections)
    problems += [words for words in integer_biases.values() if words]
    corrects = quantize.bias_correction and not m.section.training  # those are trained
    those = {f"{module}.bias" for module in m.state.modules} & set(m.parameters)
    problems += state_laws.judge_corrected(m.corrections, those if corrects else set())
    others = (
        {
            name: m.state.replaced[name] - m.corrections.get(name, 0)
            for name in m.state.replaced
            if name not in m.state.pruned_floats and name not in integer_biases
        }
        | learned
        | equalized
    )
    if not others:
        same = Distance(0.0, 0.0, 1.0, 0.0)
        why = "nothing was folded"
        return LedgerEntry("fold", "source torch", 0.0, same, not problems, why, tuple(problems))
    folded = load_torch_model(m.checkpoint, m.task, others, m.mapped)
    results = [trace.run(folded, b, m.outputs) for b in m.batches]
    return make_entry(
        "fold",
        "source torch",
        HopOutputs(results, m.float_traces, m.correct.source_outputs()),
        problems,
    )


def compress(m: Materials) -> LedgerEntry:
    """Hop `compress`: compare the state, de-quantized in torch, with the source by the recipe's
    budget, and check the laws of a state."""
    activations = m.section.quantize.activations
    problems, unjudged = _rounding(m)
    mode = None if activations is None else activations.mode
    if m.state.activations != mode:
        problems.append(f"activations are {m.state.activations!r}; the recipe says {mode!r}")
    laws: list[calibration_laws.CalibrationLaw] = []
    if m.section.training and m.section.quantize.static_activations:
        unjudged.append("ranges, which were trained")
    elif not m.section.training:
        laws = [
            range_laws.RangeLaw(m.state, activations),
            range_laws.RangeLaw(m.state, OF_OPERANDS, operands=True),
            range_laws.RangeLaw(m.state, OF_CACHES, caches=True),
            bias_correction_laws.BiasCorrectionLaw(m.state, m.parameters, m.corrections, m.filters),
        ]
    problems += _operands(m)
    problems += range_laws.unlike_recipe(m.state, m.section.quantize.kv_cache)
    floats = copy_module(m.folded_model)
    install_operands(floats, m.state.summands)
    seen = calibration_laws.judge(laws, m.simulated_model, floats, m.calibration)
    problems += seen.problems
    unjudged += seen.unjudged
    problems += [] if m.section.training else _read_otherwise(m)
    # qat trains against quantization errors: the budget is for the model before it
    source = m.float_traces
    if m.section.training:
        source = [trace.trace_run(m.untrained_model, b, m.outputs, ()) for b in m.batches]
    measured = m.output_distance([t.result for t in m.simulated_traces], source)
    budget = m.section.validate_.quantization_budget
    if not measured.relative_l2 <= budget:
        moved, allowed = write_breach(measured.relative_l2, budget)
        problems.append(
            f"{BUDGET} {moved} (relative L2); "
            f"validate.quantization_budget is {allowed}; {bisect.describe_first_excess(m, budget)}"
        )
    why = "validate.quantization_budget, chosen in the recipe"
    unproven = f"not judged: {'; '.join(unjudged)}" if unjudged else ""
    return LedgerEntry(
        "compress", "source torch", budget, measured, not problems, why, tuple(problems), unproven
    )


def _operands(m: Materials) -> list[str]:
    """Return sentences on attention operands: they must be integers exactly where the recipe asks
    for it, and probabilities must have the range 0..1."""
    activations, operands = m.section.quantize.activations, select_operands(m.state)
    integers = activations is not None and activations.attention == "int8"
    problems = (
        []
        if integers == bool(operands)
        else ["attentions multiply " + ("integers" if operands else "floats")]
    )
    return problems + [
        f"{name}: its range is {covered}, not {PROBABILITIES}"
        for name, covered in operands.items()
        if is_probabilities(name) and covered != PROBABILITIES
    ]


def _rounding(m: Materials) -> tuple[list[str], list[str]]:
    """Judge the integers of each weight by the laws of its method: (problems, sentences on weights
    that cannot be judged)."""
    quantize = m.section.quantize
    if m.section.training:
        return [
            f"{name}: the checkpoint holds other values than the trained integers"
            for name, q in m.state.weights.items()
            if not torch.equal(_unfolded(m, name, q), m.parameters[name])
        ] + sparsity_laws.find_problems(m), []
    if quantize.passes_through:
        return [
            f"{name} has other values than the checkpoint"
            for name, q in m.state.weights.items()
            if not bool((q.dequantize() == m.parameters[name]).all())
        ], []
    problems, suspects = state_laws.judge_weights(
        m.state, m.kept_weight, m.rounded_weight, m.parameters, m.rounding
    )
    problems += sparsity_laws.find_problems(m)
    if m.compares_outputs:
        compressed = m.simulated_traces
        learned = any(x.judged_by == "learned" for x in quantize.chosen)
        aims = uses_float_target(quantize, m.section.sparsity) or quantize.float_reference
        float_reference = m.unpruned_traces if aims or learned else compressed
        suspects += rounding_laws.find_suspects(m, compressed, float_reference)
    refused, unjudged = resampled.judge_suspects(m, suspects)
    untraced = len(m.modules) - len(m.judged_alone)
    if m.compares_outputs and untraced:
        unjudged.append(f"outputs of {untraced} modules (validate.ledger: {m.depth})")
    return problems + refused, unjudged + rounding_laws.list_unjudged(m)


def _read_otherwise(m: Materials) -> list[str]:
    """Return [a sentence] where calibration data differ from those of the recipe, else []."""
    read, expected = m.calibration_counts
    if read == expected:
        return []
    return [f"calibration read {read or 'nothing'}; the recipe says {expected or 'nothing'}"]


def _unfolded(m: Materials, name: str, q: QTensor) -> Tensor:
    """Compute the value (out, in) that hop `fold` expects in the checkpoint for a trained weight:
    the integers `q` de-quantized, times the factor of its input."""
    factor = m.state.factor_of(owner_of(name))
    return q.dequantize() if factor is None else q.dequantize() * factor


def export(m: Materials) -> LedgerEntry:
    """Hop `export`: compare the float graph with torch, end to end and piece by piece, and every
    parameter by value."""
    path = m.graph / "model.onnx"
    graph = open_graph(path)
    problems = graph_laws.compare_interface(m, graph)
    problems += graph_laws.compare_parameters(m, graph)
    traces = m.samples.with_continuations([*m.folded_traces, *m.folded_extremes], path)
    with m.work_folder() as work:
        at = _judged_edges(m, cut.list_edges(graph, m.modules))
        sample = m.samples.of_pieces(m.folded_traces, path)
        linear = linears.read_float_graph(m)
        parts = pieces.judge_products(graph, at, sample, linear, work, pieces.AS_WRITTEN)
        if m.depth == "full":
            limits = m.correct.module_inputs("folded", m.precision)
            parts += pieces.judge_between(graph, at, sample, limits, work, pieces.AS_WRITTEN)
    with _modules_named(parts):
        results = m.in_files(pieces.run_graph(path, traces, m.compared, pieces.FUSED_FLOAT))
    answers = HopOutputs(results, traces, m.correct.graph_outputs("folded", m.precision))
    entry = make_entry("export", "float torch", answers, problems, parts)
    return entry.with_unproven(m.not_judged_alone, m.untested_sizes)


def _judged_edges(m: Materials, edges: Sequence[cut.Edge]) -> list[cut.Edge]:
    """Return the edges of the modules that are judged alone."""
    judged = {*m.judged_alone, *m.judged_summands}
    return [edge for edge in edges if edge.module in judged]


@contextmanager
def _modules_named(parts: Sequence[pieces.JudgedPiece]) -> Iterator[None]:
    """Convert a HarnessError of a graph that does not run, such as one with positions outside of
    their table, to a LedgerError that names the pieces beyond their limits first."""
    try:
        yield
    except HarnessError as e:
        off = [p.problem for p in sorted(parts, key=lambda p: -p.ratio) if not p.fine]
        raise LedgerError("; ".join([*off, str(e)])) from e


def lower(m: Materials) -> LedgerEntry:
    """Hop `lower`: compare the lowered graph, operators as written, with the state in torch."""
    path = m.model / "model.onnx"
    graph = m.lowered_graph
    problems = graph_laws.compare_interface(m, graph)
    quantized = set(m.state.modules)
    lowered = set(m.lowering["modules"])
    problems += [f"{name}: left in float without saying so" for name in sorted(quantized - lowered)]
    problems += [f"{name}: lowered, but float in the state" for name in sorted(lowered - quantized)]
    problems += graph_laws.compare_weights(m, graph)
    problems += graph_laws.compare_activations(m, graph)
    problems += graph_laws.compare_biases(m, graph)
    carried = cut.find_changed(m.graph / "model.onnx", graph, m.names.parameters.values())
    problems += [f"{name}: the float graph holds other values" for name in carried]
    problems += [
        f"{name}: the graph reads a float weight" for name in cut.find_floats(graph, quantized)
    ]
    traces = m.samples.with_continuations([*m.simulated_traces, *m.simulated_extremes], path)
    with m.work_folder() as work:
        at = _judged_edges(m, cut.list_edges(graph, m.modules, m.state.summands))
        sample = m.samples.of_pieces(m.simulated_traces, path)
        linear = linears.read_lowered_graph(m, fused=False)
        parts = pieces.judge_quantizers(graph, at, sample, linear, work, pieces.AS_WRITTEN)
        parts += pieces.judge_products(graph, at, sample, linear, work, pieces.AS_WRITTEN)
        if m.depth == "full":
            limits = m.correct.module_inputs("state", m.precision)
            parts += pieces.judge_between(graph, at, sample, limits, work, pieces.AS_WRITTEN)
    spread = m.correct.graph_outputs("state", m.precision)
    with _modules_named(parts):
        answers = HopOutputs(m.lowered_outputs, traces, spread)
    entry = make_entry("lower", "state in torch", answers, problems, parts)
    return entry.with_unproven(m.not_judged_alone, m.untested_sizes)


def engine(m: Materials) -> LedgerEntry:
    """Hop `engine`: compare the engine with the lowered graph, and check its inspection."""
    inspected, target = m.inspected.get("inspected") or {}, m.section.target
    fallbacks = [] if target.allow_precision_fallback else inspected.get("wider", [])
    problems = [f"{name}: runs in higher precision than the recipe says" for name in fallbacks]
    eligible = inspected.get("eligible")
    if eligible is not None and eligible != len(m.state.weights):
        problems.append(f"{eligible} modules were inspected, the state has {len(m.state.weights)}")
    reason = target_runner.explain_not_run(m)
    if reason:
        problems += _padding_problems(m)
        ok = False if problems else None
        return LedgerEntry("engine", "lowered graph", None, None, ok, reason, tuple(problems))
    path = m.model / "model.onnx"
    traces = m.samples.with_continuations([*m.simulated_traces, *m.simulated_extremes], path)
    lowered = [replace(t, result=o) for t, o in zip(traces, m.lowered_outputs, strict=True)]
    if target.device != "cpu":
        results = target_runner.run_engine(m, traces)
        answers = HopOutputs(results, lowered, m.correct.graph_outputs("state", m.precision))
        entry = make_entry("engine", "lowered graph", answers, problems)
        return replace(entry, why=f"{entry.why}; {UNCUT}").with_unproven(UNCUT, m.untested_sizes)
    graph, opener = m.lowered_graph, target_runner.make_piece_opener(m)
    with m.work_folder() as work:
        at = _judged_edges(m, cut.list_edges(graph, m.modules, m.state.summands))
        sample = m.samples.of_pieces(m.simulated_traces, path)
        linear = linears.read_lowered_graph(m, fused=True)
        parts = pieces.judge_quantizers(graph, at, sample, linear, work, opener)
        parts += pieces.judge_products(graph, at, sample, linear, work, opener)
    if not m.kernel_blocks:
        results = target_runner.run_fused(m, traces)
        spread = m.correct.graph_outputs("state", target.computes_in)
        answers = HopOutputs(results, lowered, spread)
        entry = make_entry("engine", "lowered graph", answers, problems, parts)
        coarser = COARSER if target.computes_in != m.precision else ""
        return entry.with_unproven(coarser, m.not_judged_alone, m.untested_sizes)
    quantized = m.samples.with_continuations(m.kernel_traces, path)
    results = target_runner.run_fused(m, quantized)
    start, spread = "state in torch, inputs quantized as in kernels", m.correct.kernel_outputs()
    entry = make_entry("engine", start, HopOutputs(results, quantized, spread), problems, parts)
    if not entry.ok:  # kernels of another processor may quantize otherwise, or not at all
        results, spread = target_runner.run_fused(m, traces), m.correct.kernel_quantization()
        answers = HopOutputs(results, lowered, spread)
        entry = make_entry("engine", "lowered graph", answers, problems, parts)
    why = f"{entry.why}; {HIDDEN}"
    return replace(entry, why=why).with_unproven(m.not_judged_alone, m.untested_sizes)


def _padding_problems(m: Materials) -> list[str]:
    """Return sentences on outputs that change where batches are padded to the sizes of an engine
    that is not run here: the lowered graph on the CPU is judged by the engine's limits."""
    padded = target_runner.open_padded(m, "cpu")
    if padded is None:
        return []
    traces = [*m.simulated_traces, *m.simulated_extremes]
    lowered = [replace(t, result=o) for t, o in zip(traces, m.lowered_outputs, strict=True)]
    results = target_runner.run_engine(m, traces, padded)
    spread = m.correct.graph_outputs("state", m.precision)
    entry = make_entry("engine", "lowered graph", HopOutputs(results, lowered, spread), [])
    return [f"padded to the engine's sizes, {problem}" for problem in entry.problems]


def harness(m: Materials) -> LedgerEntry:
    """Hop `harness`: compare a bundle's way from inputs to answers with transformers and torch."""
    folder = m.bundle or m.source
    served = contracts.read(folder / "contract.json")
    tokens_folder = folder if m.bundle else folder / "checkpoint"
    kind = tasks.check(served, str(folder / "contract.json")).inputs
    encoder = kind.open(tokens_folder, served)
    checkpoint = m.source / "checkpoint"
    problems = contract_laws.compare_contract(m.contract, served, checkpoint)
    laws = contract_laws.INPUTS[kind.name]
    problems += laws.arrays(checkpoint, m.contract, served, encoder, list(m.texts)[:8])
    problems += contract_laws.compare_labels(m.contract, served, checkpoint, m.batches[1])
    answers, expected = [], []
    with closing(target_runner.open_served(m)) as runner:
        for batch in (*m.batches, *m.extremes):
            width = batch.real.shape[1] if kind.size else None
            arrays = tasks.encode(served, encoder, batch.inputs, None, width)
            outputs = runner.infer(arrays)
            values = tasks.decode(served, outputs, arrays)
            again = tasks.decode(served, runner.infer(arrays), arrays)
            if not np.array_equal(values, again):
                problems.append(f"the same {kind.name}s answered twice give different bits")
            answers += list(values)
            expected += list(zip(*contract_laws.evaluate(m.contract, outputs, batch), strict=True))
        answering = _laws_of_answers(served)
        problems += answering.compare_answers(m, served, encoder, runner)
    measured = measure_distance((f, w) for f, (w, _) in zip(answers, expected, strict=True))
    both = zip(answers, expected, strict=True)
    ratio = max((_ratio(f, w, bound) for f, (w, bound) in both), default=0)
    if not ratio <= 1:
        problems.append(f"an answer is off by {write_breach(ratio, 1.0)[0]} times its rounding")
    why = "pooling and normalization in float32, bounded element by element"
    entry = LedgerEntry("harness", "torch", None, measured, not problems, why, tuple(problems))
    explains = answering in (answer_laws, tensor_laws)
    unjudged = answering.explain_unjudged(m.contract.task) if explains else ""
    return entry.with_unproven(unjudged, m.untested_sizes)


def _laws_of_answers(contract: contracts.Contract) -> Any:
    task = tasks.look_up(contract)
    if not task.output:
        return tensor_laws if contract.detections is None else detector_laws
    if task.chooses:
        return claim_laws
    return span_laws if task.extracts else answer_laws


def _ratio(value: Any, expected: Any, bound: Any) -> float:
    """Return a hop's largest |value - expected| / bound; infinite for another shape, a value that
    is not finite, or a difference where the bound is 0."""
    if value.shape != expected.shape or not np.isfinite(value).all():
        return float("inf")
    error = np.abs(value.astype(np.float64) - expected)
    ratio = np.divide(error, bound, out=np.where(error > 0, np.inf, 0.0), where=bound > 0)
    return float(ratio.max(initial=0.0))
