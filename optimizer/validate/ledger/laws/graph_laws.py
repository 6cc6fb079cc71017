"""What a graph must hold to the bit: names, parameters, integers, scales and biases, each
function Materials, graph -> what is wrong, with the checkpoint's names."""

from __future__ import annotations

import numpy as np

from optimizer.foundation.state import owner_of
from optimizer.lower.onnx import attention_operands, cut
from optimizer.lower.onnx.graph_constants import biases as biases_of
from optimizer.lower.onnx.graph_constants import input_quantizations
from optimizer.lower.onnx.opened import Opened, Source, opened
from optimizer.model.architectures.operands import attention_of
from optimizer.validate.ledger.laws import constant_laws
from optimizer.validate.ledger.pieces import linears
from optimizer.validate.materials import Materials


def interface(m: Materials, graph: Source) -> list[str]:
    """Input and output names, and the constants of constant_laws.py."""
    summary = cut.summary(graph)
    expected = {*(i.name for i in m.contract.inputs), *m.cache_names[0]}
    problems = []
    if set(summary.inputs) != expected:
        problems.append(
            f"inputs are {sorted(summary.inputs)}, the contract says {sorted(expected)}"
        )
    if set(m.compared) - set(summary.outputs):
        problems.append(f"outputs are {sorted(summary.outputs)}, the contract says {m.compared}")
    return problems + constant_laws.constants(m, graph, summary)


def parameters(m: Materials, graph: Source) -> list[str]:
    """Parameters whose initializer is not the value torch runs with, stored either way round."""
    stored = cut.initializers(graph, m.names.parameters.values())
    ours = dict(m.folded_model.named_parameters(remove_duplicate=False))
    wrong = []
    for name, initializer in m.names.parameters.items():
        if name not in ours:
            continue
        value, initial = ours[name].detach().numpy(), stored[initializer]
        value = value.astype(np.float16 if m.precision == "fp16" else np.float32)
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


def weights(m: Materials, graph: Source) -> list[str]:
    """Quantized parameters whose value in the graph is not the state's, bit for bit."""
    once = graph if isinstance(graph, Opened) else opened(graph)
    return [
        f"{name}: the graph holds other integers than the state"
        for name, q in m.state.weights.items()  # one by one: in float they are four times as large
        if not np.array_equal(cut.dequantized(once, [name])[name], q.dequantize())
    ]


def activations(m: Materials, graph: Source) -> list[str]:
    """Inputs whose scale, zero point or offset in the graph is not that of the state's range."""
    if m.state.activations != "tensor":
        return []
    quantizers = input_quantizations(graph, set(m.state.modules), m.state.summands)
    problems = []
    for site, ours in m.state.ranges.items():
        name = owner_of(site)
        quantizer = quantizers.get(name)
        if quantizer is None:
            problems.append(f"{name}: the graph does not code its input")
            continue
        if m.signed or (attention_of(name) and attention_operands.signed(ours)):
            right = quantizer.zero_point == 0 and quantizer.offset == ours.offset
        else:
            right = quantizer.zero_point == ours.zero_point and quantizer.offset == 0
        if quantizer.scale != ours.scale or not right:
            problems.append(
                f"{name}: its input is coded with {quantizer}; the state's range has scale "
                f"{ours.scale:.6g}, zero point {ours.zero_point}, offset {ours.offset:.6g}"
            )
    return problems


def biases(m: Materials, graph: Source) -> list[str]:
    """Modules whose bias in the graph is not the state's, rounded once to the graph's type."""
    problems = []
    for name, bias in biases_of(graph, m.modules).items():
        expected = linears.stored_bias(m, name)
        if (bias is None) != (expected is None):
            problems.append(f"{name}: the graph has {'no' if bias is None else 'a'} bias")
        elif bias is not None and expected is not None:
            same = bias.dtype == expected.dtype and np.array_equal(bias.reshape(-1), expected)
            problems += [] if same else [f"{name}: the graph holds another bias than the state"]
    return problems
