"""Check names, parameters and constants of a graph, which distances of outputs are too coarse to
show.

compared   a graph's inputs, outputs, initializers and attributes with the contract, the checkpoint
           and the compressed state
limit      none: equal to the bit. Epsilons may differ by a float32 rounding; a cosine by the
           rounding of its angle and ULPS units in the last place
caught     a parameter through float16, swapped or stale rows, a code or zero point off by one,
           scales doubled, another epsilon, GELU by tanh, a module left in float:
           test_a_planted_fault_is_caught_at_its_hop,
           test_a_subtle_fault_of_a_graph_is_caught_at_its_hop_and_named

Each function is (Materials, graph) -> problems with the checkpoint's names. Called by the hops
`export` and `lower`. `constants` runs the last four laws:

 1. epsilons   of each norm of the torch model, in every pattern of nodes that the graph has
 2. functions  GELU by erf or by tanh, as the torch module computes it
 3. buffers    an initializer with the name of a torch buffer holds its values
 4. angles     tables of cosines and sines are those of the rotary embedding's frequencies
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import nn

from optimizer.foundation.rounding.random_rounding import ULPS
from optimizer.foundation.state import owner_of
from optimizer.lower.onnx import attention_operands, cut
from optimizer.lower.onnx.graph_constants import read_biases, read_input_quantizations
from optimizer.lower.onnx.graph_source import OpenGraph, Source, open_graph
from optimizer.model.architectures.operands import find_attention
from optimizer.validate.ledger.pieces import linears
from optimizer.validate.ledger.pieces.roundoff import UNIT
from optimizer.validate.materials import Materials

TABLES = {"rotary_cos": np.cos, "rotary_sin": np.sin}  # of lower/ort/attention.py
KINDS = {"none": "by erf", "tanh": "by tanh"}


def compare_interface(m: Materials, graph: Source) -> list[str]:
    """Return sentences on names of inputs and outputs that differ from the contract, and on
    constants that differ from torch (laws 1 to 4)."""
    summary = cut.summarize(graph)
    expected = {*(i.name for i in m.contract.inputs), *m.cache_names[0]}
    problems = []
    if set(summary.inputs) != expected:
        problems.append(
            f"inputs are {sorted(summary.inputs)}, the contract says {sorted(expected)}"
        )
    if set(m.compared) - set(summary.outputs):
        problems.append(f"outputs are {sorted(summary.outputs)}, the contract says {m.compared}")
    return problems + compare_constants(m, graph, summary)


def compare_parameters(m: Materials, graph: Source) -> list[str]:
    """List the parameters whose initializer is neither the value that torch runs with nor its
    transpose."""
    stored = cut.read_initializers(graph, m.names.parameters.values())
    in_torch = dict(m.folded_model.named_parameters(remove_duplicate=False))
    wrong = []
    for name, initializer in m.names.parameters.items():
        if name not in in_torch:
            continue
        value, initial = in_torch[name].detach().numpy(), stored[initializer]
        value = value.astype(np.float16 if m.precision == "fp16" else np.float32, copy=False)
        entry = m.names.modules.get(name.removesuffix(".weight"))
        turned = entry is not None and entry.parameter == name and entry.layout == "KN"
        same = initial.dtype == value.dtype and (
            np.array_equal(initial, value.T)
            if turned
            else np.array_equal(initial, value) or np.array_equal(initial, value.T)
        )
        if not same:
            wrong.append(f"{name}: the graph holds other values")
    return wrong


def compare_weights(m: Materials, graph: Source) -> list[str]:
    """List the quantized weights whose de-quantized value in the graph differs from the state's in
    any bit."""
    once = graph if isinstance(graph, OpenGraph) else open_graph(graph)
    return [
        f"{name}: the graph holds other integers than the state"
        for name, q in m.state.weights.items()
        # in slices of rows: in float a weight is four times as large
        if not all(
            np.array_equal(cut.dequantize(once, name, r), q.dequantize(r)) for r in q.slices()
        )
    ]


def compare_activations(m: Materials, graph: Source) -> list[str]:
    """List the module inputs whose scale, zero point or offset in the graph differs from the range
    in the state."""
    if m.state.activations != "tensor":
        return []
    quantizers = read_input_quantizations(graph, set(m.state.modules), m.state.summands)
    problems = []
    for site, covered in m.state.ranges.items():
        name = owner_of(site)
        quantizer = quantizers.get(name)
        if quantizer is None:
            problems.append(f"{name}: the graph does not quantize its input")
            continue
        if m.signed or (find_attention(name) and attention_operands.is_signed(covered)):
            right = quantizer.zero_point == 0 and quantizer.offset == covered.offset
        else:
            right = quantizer.zero_point == covered.zero_point and quantizer.offset == 0
        if quantizer.scale != covered.scale or not right:
            problems.append(
                f"{name}: its input is quantized with {quantizer}; the state's range has scale "
                f"{covered.scale:.6g}, zero point {covered.zero_point}, offset {covered.offset:.6g}"
            )
    return problems


def compare_biases(m: Materials, graph: Source) -> list[str]:
    """List the modules whose bias in the graph differs from the state's, rounded once to the
    graph's type."""
    problems = []
    for name, bias in read_biases(graph, m.modules).items():
        expected = linears.compute_stored_bias(m, name)
        if (bias is None) != (expected is None):
            problems.append(f"{name}: the graph has {'no' if bias is None else 'a'} bias")
        elif bias is not None and expected is not None:
            same = bias.dtype == expected.dtype and np.array_equal(bias.reshape(-1), expected)
            problems += [] if same else [f"{name}: the graph holds another bias than the state"]
    return problems


def compare_constants(m: Materials, graph: Source, summary: cut.GraphSummary) -> list[str]:
    """Return a problem for each epsilon, GELU, buffer and table of angles of the graph that differs
    from torch's (laws 1 to 4).

    summary: result of cut.summarize(graph)
    """
    problems = compare_epsilons(m, summary.epsilons) + compare_gelus(m, summary.gelus)
    return problems + compare_buffers(m, graph) + compare_angles(m, graph)


def compare_epsilons(m: Materials, in_graph: Mapping[str, Sequence[float]]) -> list[str]:
    """Check law 1: return a problem for each norm with another epsilon in the graph than in torch.

    in_graph: {module: epsilon of each of its norms in the graph}
    """
    problems = []
    for name, module in m.float_model.named_modules():
        expected = _epsilon(module)
        if expected is None or f"{name}.weight" not in m.names.parameters:
            continue
        if name not in in_graph:
            problems.append(
                f"{name}: no epsilon is found in the graph, torch's is {expected:.3g}; expected a "
                "norm in one operator, or the square root of a mean plus a constant"
            )
        problems += [
            f"{name}: epsilon is {epsilon:.3g}, torch's is {expected:.3g}"
            for epsilon in in_graph.get(name, ())
            if not np.isclose(epsilon, expected, rtol=2 * UNIT["fp32"], atol=0)
        ]
    return problems


def _epsilon(module: nn.Module) -> float | None:
    """The epsilon that law 1 expects of a norm; None for another module. RMS norms of transformers
    are classes of each architecture, recognized by the attribute's name."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) and hasattr(module, "weight") else None


def compare_gelus(m: Materials, kinds: Mapping[str, str]) -> list[str]:
    """Check law 2: return a problem for each GELU of another kind in the graph than in torch.

    kinds: {module: kind in the graph, "none" (by erf) or "tanh"}
    """
    modules = dict(m.float_model.named_modules())
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    problems = []
    for name, kind in kinds.items():
        module = modules.get(name)
        if not name or module is None or any(True for _ in module.children()):
            continue
        with torch.no_grad():
            values = module(x)
        far = {f: float((nn.functional.gelu(x, approximate=f) - values).abs().max()) for f in KINDS}
        nearest = min(far, key=lambda f: far[f])
        if kind != nearest:
            problems.append(
                f"{name}: GELU is {KINDS[kind]} in the graph, {KINDS[nearest]} in torch"
            )
    return problems


def compare_buffers(m: Materials, graph: Source) -> list[str]:
    """Check law 3: return a problem for each buffer of the torch model that has other values in the
    graph. Buffers that the exporter folded into other constants have no initializer and are
    skipped."""
    in_torch = dict(m.folded_model.named_buffers())
    problems = []
    for name, stored in cut.read_initializers_among(graph, in_torch).items():
        value = in_torch[name].detach().numpy().astype(stored.dtype)
        if stored.size != value.size or not np.array_equal(stored.ravel(), value.ravel()):
            problems.append(f"{name}: the graph holds other values")
    return problems


def compare_angles(m: Materials, graph: Source) -> list[str]:
    """Check law 4: return a problem for each table of cosines and sines that differs from torch's
    by more than the rounding of the angle, ULPS units of the cosine and rounding to the table's
    float type."""
    problems = []
    for name, table in cut.read_initializers_among(graph, TABLES).items():
        far = []
        for buffer, frequencies in m.float_model.named_buffers():
            owner = m.float_model.get_submodule(buffer.rpartition(".")[0])
            if not buffer.endswith("inv_freq") or len(frequencies) != table.shape[1]:
                continue
            scale = float(getattr(owner, "attention_scaling", 1.0))
            angle = np.arange(len(table))[:, None] * frequencies.detach().double().numpy()
            exact = TABLES[name](angle)
            stored = UNIT["fp16"] * np.abs(exact) if table.dtype == np.float16 else 0
            bound = UNIT["fp32"] * (angle + 2 * ULPS + 1) + stored
            error = np.abs(table.astype(np.float64) / scale - exact)
            far.append((float((error / bound).max()), buffer))
        if far and not min(far)[0] <= 1:
            problems.append(
                f"{min(far)[1]}: {name} is {min(far)[0]:.3g} times as far from its angles as "
                "rounding allows"
            )
    return problems
