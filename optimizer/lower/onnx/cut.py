"""Cut a graph at the inputs and outputs of its linear modules.

Each piece runs alone on the reference's tensors at the cut, so that errors before it neither hide
nor add to its own. The full graph gets no extra outputs, which would stop a runtime from fusing
across them.

    quantizers   side by side, the input of every module that quantizes it -> its integers (and,
                 per token, the step of each row)
    products     side by side, the input of every linear module -> its output; the input is its
                 integers where it is quantized
    rest         everything else: model inputs and every module's output -> every module's input
                 and the model outputs

Works on float and lowered graphs alike: nodes carry the module they came from in their metadata
(export/scopes.py), and nodes that a lowering inserted carry the module that they serve. Packed
products are unpacked first (lower/ort/pack.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

from optimizer.export import onnx_file
from optimizer.export.scopes import module_of
from optimizer.foundation.errors import OptimizeError
from optimizer.lower.onnx import convolution, norm_epsilons
from optimizer.lower.onnx.graph_source import OpenGraph, Source, open_model, place_of
from optimizer.lower.onnx.qdq import name_codes, read_back, scale_name
from optimizer.lower.ort import product as ort_product
from optimizer.lower.ort.sequence_first import is_sequence_first

OF_INTEGERS = ("MatMulInteger", ort_product.OPERATOR)
PRODUCTS = ("MatMul", "Gemm", convolution.OPERATOR, *OF_INTEGERS)
LAYOUT = ("Reshape", "Unsqueeze", "Squeeze", "Identity")  # the same integers in another shape


@dataclass(frozen=True)
class Edge:
    """Names of the tensors at which one use of a linear module is cut from a lowered graph.

    input, output: float tensors; their ranks are 2 where (batch, sequence, width) is flattened
    integers: tensor of the quantized input, "" for a float one
    step: tensor with the scale of each row where it is computed at run time, of rank
        integers_rank; "" for a constant scale
    sides: (top, left, bottom, right) padding of the integers with the integer of 0
    multiplies: False for the operand of a residual add or pooling
    convolves: True where the input is images (image, channel, row, column)
    sequence_first: True where input and output are (sequence, batch, width)
    """

    module: str
    input: str
    output: str
    input_rank: int
    output_rank: int
    integers: str = ""
    step: str = ""
    integers_rank: int = 0
    sides: tuple[int, ...] = ()
    multiplies: bool = True
    convolves: bool = False
    sequence_first: bool = False


@dataclass(frozen=True)
class GraphSummary:
    """Facts about a lowered graph that comparing its outputs alone might not show.

    by_column: attentions number positions by columns of the KV cache, not by position_ids, so the
        keys of a row padded on the left are rotated by its padding (lower/ort/attention.py)
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    epsilons: dict[str, tuple[float, ...]]  # {module: epsilon of each of its norms}
    gelus: dict[str, str]  # {module: "none" (erf) or "tanh"} of each Gelu
    by_column: bool = False


def summarize(source: Source) -> GraphSummary:
    """Summarize a lowered graph for the ledger's laws; external weights are not read."""
    model = source.model if isinstance(source, OpenGraph) else onnx_file.load(source)
    graph = model.graph
    inputs = tuple(str(v.name) for v in graph.inputs if not v.is_initializer())
    by_column = any(n.op_type == "GroupQueryAttention" for n in graph)
    outputs = tuple(str(v.name) for v in graph.outputs)
    gelus = {
        module_of(n): n.attributes.get_string("approximate", "none")
        for n in graph
        if n.op_type == "Gelu"
    }
    return GraphSummary(inputs, outputs, norm_epsilons.read_epsilons(graph), gelus, by_column)


def list_edges(
    source: Source, modules: Collection[str], summands: Collection[str] = ()
) -> list[Edge]:
    """List, where the graph may be cut, every use of every linear module in graph order, then the
    operands of residual adds.

    modules: names of all linear modules
    summands: names of the identities before residual adds and poolings
    Raises OptimizeError naming a module without a product.
    """
    model = open_model(source)
    products = [
        n for n in model.graph if n.op_type in PRODUCTS and is_of(n, modules) and has_weight(n)
    ]
    missing = sorted(set(modules) - {module_of(n) for n in products})
    if missing:
        raise OptimizeError(f"{missing[0]} has no product in the graph", where=place_of(source))
    outputs = {n: find_leaving(n) for n in products}
    cuts = []
    for product in products:
        entering = find_entering(product, modules, set(outputs.values()))
        leaving = outputs[product]
        cuts.append(
            Edge(
                module_of(product),
                str(entering.name),
                str(leaving.name),
                _rank(entering),
                _rank(leaving),
                *_quantized(product, entering),
                convolves=product.op_type == convolution.OPERATOR,
                sequence_first=is_sequence_first(product),
            )
        )
    return cuts + [_summand(model, name) for name in summands]


def _summand(model: ir.Model, module: str) -> Edge:
    """Build the edge of an identity, from the float tensor that its operators read to their
    output; OptimizeError where it is not quantized exactly once."""
    own = list_summand_operators(model, module)
    inside = {v for n in own for v in n.outputs}
    inputs = [n.inputs[0] for n in own if n.inputs[0] not in inside]
    outputs = [v for v in inside if not any(module_of(n) == module for n, _ in v.uses())]
    integers = [n.outputs[0] for n in own if n.op_type == "QuantizeLinear"]
    if not len(inputs) == len(outputs) == len(integers) == 1 or inputs[0] is None:
        raise OptimizeError(f"the output of {module} is not quantized exactly once", where="cut")
    if not outputs[0].uses():
        raise OptimizeError(f"the integers of the output of {module} are not read", where="cut")
    x, y, rank = str(inputs[0].name), str(outputs[0].name), _rank(inputs[0])
    return Edge(module, x, y, rank, rank, str(integers[0].name), "", rank, multiplies=False)


def list_summand_operators(model: ir.Model, module: str) -> list[ir.Node]:
    """List the operators of an identity before a residual add, with its QuantizeLinear, which may
    belong to a convolution that reads the same tensor."""
    own = [n for n in model.graph if module_of(n) == module]
    makers = [
        n.inputs[0].producer() for n in own if n.op_type == "DequantizeLinear" and n.inputs[0]
    ]
    return [*(q for q in makers if q is not None and q not in own), *own]


def is_of(node: ir.Node, modules: Collection[str]) -> bool:
    """Test that `node` of an ONNX graph came from one of `modules`, by its metadata."""
    return module_of(node) in modules


def has_weight(node: ir.Node) -> bool:
    """Test that the second operand of a node in an exported or lowered graph is an initializer,
    directly or through the first operands of other nodes (DequantizeLinear, Transpose, ...)."""
    value = node.inputs[1]
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None:
            return False
        value = producer.inputs[0]
    return value is not None


def find_leaving(product: ir.Node) -> ir.Value:
    """Find the output of the module of `product` in an exported or lowered graph: that of the last
    operator of its chain (product, rescaling, bias)."""
    node = product
    while True:
        users = [n for n, _ in node.outputs[0].uses()]
        same = len(users) == 1 and module_of(users[0]) == module_of(product)
        if not same or users[0].op_type == "Reshape":  # back to rank 3, by run-time sizes
            return node.outputs[0]
        node = users[0]


def find_entering(product: ir.Node, modules: Collection[str], leaving: set[ir.Value]) -> ir.Value:
    """Find the float tensor that the module of `product` reads in a lowered graph, in front of the
    operators that a lowering inserted.

    modules: names of all linear modules
    leaving: outputs of all modules, at which the search ends
    """
    value = product.inputs[0]
    assert value is not None
    while value not in leaving:
        node = value.producer()
        if node is None or not is_of(node, modules) or not node.inputs:
            break
        before = node.inputs[0]
        assert before is not None
        value = before
    return value


def _quantized(product: ir.Node, entering: ir.Value) -> tuple[str, str, int, tuple[int, ...]]:
    """Return the fields (integers, step, integers_rank, sides) of the Edge of a product in a
    lowered graph.

    The integers are those that are multiplied or dequantized, so operators on them after
    QuantizeLinear belong to the quantizer.
    """
    value = product.inputs[0]
    integers = value if product.op_type in OF_INTEGERS else None
    while value is not None and value is not entering:
        node = value.producer()
        if node is None or not node.inputs:
            break
        if node.op_type == "QuantizeLinear":
            step, integers = node.inputs[1], integers or node.outputs[0]
            assert step is not None
            name = "" if step.is_initializer() else str(step.name)
            return str(integers.name), name, _rank(node.inputs[0]), _sides(node.inputs[0], entering)
        moved = value is integers and node.op_type in LAYOUT
        if node.op_type == "DequantizeLinear" or moved:
            integers = node.inputs[0]
        value = node.inputs[0]
    return "", "", 0, ()


def _sides(value: ir.Value | None, entering: ir.Value) -> tuple[int, ...]:
    """Return the padding that a lowering put in front of the quantizer that reads `value`; () for
    none, and for a Pad of the model's own, which gives what the module reads."""
    node = None if value is None or value is entering else value.producer()
    if node is None or node.op_type != "Pad" or node.inputs[1] is None:
        return ()
    assert node.inputs[1].const_value is not None
    _, _, top, left, _, _, bottom, right = node.inputs[1].const_value.numpy().tolist()
    return top, left, bottom, right


def _rank(value: ir.Value | None) -> int:
    if value is None or value.shape is None:
        name = None if value is None else value.name
        raise OptimizeError(f"the rank of {name} cannot be inferred", where="cut")
    return len(value.shape)


def cut(source: Source, inputs: Sequence[str], outputs: Sequence[str], out: Path) -> None:
    """Write to `out` the part of a lowered ONNX graph between these tensors."""
    model = open_model(source)
    piece = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    for value in piece.inputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    onnx_file.save(ir.Model(piece, ir_version=model.ir_version), out)


def write_quantizers(source: Source, at: Sequence[Edge], out: Path) -> None:
    """Cut the modules' quantizers out of a lowered graph and write them to `out` as piece
    "quantizers". at: edges with integers"""
    with_one = [e for e in at if e.integers]
    results = [t for e in with_one for t in (e.integers, e.step) if t]
    cut(source, list(dict.fromkeys(e.input for e in with_one)), list(dict.fromkeys(results)), out)


def split(at: Sequence[Edge]) -> list[list[Edge]]:
    """Split the edges of a lowered graph into few parts, each of which can be cut out as one piece.

    Within a part, no edge's output is another's input (as of linear modules that follow each other
    directly), and edges with one float input have the same integers of it.
    """
    parts: list[list[Edge]] = []
    for edge in at:
        for part in parts:
            read, written = {e.input for e in part}, {e.output for e in part}
            alike = all(e.integers == edge.integers for e in part if e.input == edge.input)
            if edge.output not in read and edge.input not in written and alike:
                part.append(edge)
                break
        else:
            parts.append([edge])
    return parts


def write_products(
    source: Source, at: Sequence[Edge], out: Path, *, quantizers: bool = False
) -> None:
    """Cut the modules' matrix products out of a lowered graph and write them to `out` as piece
    "products".

    at: one part of `split`
    quantizers: True to include the modules' quantizers
    """
    inputs = [
        t
        for e in at
        for t in ((e.integers, e.step) if e.integers and not quantizers else (e.input,))
        if t
    ]
    cut(source, list(dict.fromkeys(inputs)), [e.output for e in at], out)


def write_rest(source: Source, at: Sequence[Edge], out: Path) -> bool:
    """Cut everything but the modules out of a lowered graph and write it to `out` as piece "rest".
    Returns False, without a file, where modules side by side are the whole graph."""
    interface = summarize(source)
    needed = dict.fromkeys([*(e.input for e in at), *interface.outputs])
    inputs = [*interface.inputs, *(e.output for e in at)]
    both = [w for w in needed if w not in inputs]
    if both:
        cut(source, inputs, both, out)
    return bool(both)


def read_initializers(source: Source, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Read initializers of a lowered graph as {name: array}. Raises OptimizeError for a name that
    the graph lacks."""
    by_name = open_model(source).graph.initializers
    arrays = {}
    for name in names:
        value = by_name.get(name)
        if value is None or value.const_value is None:
            raise OptimizeError(f"no initializer {name!r}", where=place_of(source))
        arrays[name] = value.const_value.numpy()
    return arrays


def read_initializers_among(source: Source, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read, as {name: array}, those of `names` that are initializers of a lowered graph."""
    available = open_model(source).graph.initializers
    return read_initializers(source, [name for name in names if name in available])


def find_floats(source: Source, modules: Collection[str]) -> list[str]:
    """List, sorted, those of `modules` that still multiply by a float initializer in a lowered
    graph, or look up rows of a float table."""
    wrong = set()
    for node in open_model(source).graph:
        if node.op_type == "Gather" and is_of(node, modules):
            table = node.inputs[0]
            scale = scale_name(f"{module_of(node)}.weight")
            if (
                table is not None
                and table.is_initializer()
                and table.name != scale
                and _float(table)
            ):
                wrong.add(module_of(node))
        if node.op_type not in PRODUCTS or not is_of(node, modules) or not has_weight(node):
            continue
        ends, pending = [], [node.inputs[1]]
        while pending:
            value = pending.pop()
            producer = value.producer() if value is not None else None
            if value is not None and value.is_initializer():
                ends.append(value)
            elif producer is not None:
                pending += producer.inputs[:1]
        if any(_float(v) for v in ends):
            wrong.add(module_of(node))
    return sorted(wrong)


def _float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def find_changed(before: Source, after: Source, names: Iterable[str]) -> list[str]:
    """List, sorted, those of `names` that are initializers of both graphs, before and after a step
    of lowering, and differ in value or type.

    before: graph without packed products
    """
    model = before.model if isinstance(before, OpenGraph) else onnx_file.load(before)
    a, b = model.graph.initializers, open_model(after).graph.initializers
    wrong = []
    for name in sorted(set(names) & set(a) & set(b)):
        x, y = a[name].const_value, b[name].const_value
        if x is None or y is None or x.dtype != y.dtype or x.tobytes() != y.tobytes():
            wrong.append(name)
    return wrong


def dequantize(source: Source, parameter: str, rows: slice = slice(None)) -> NDArray[Any]:
    """Compute a parameter's float32 value (out, in), or some of its rows, from the integers and
    scales of a lowered graph.

    Raises OptimizeError naming a parameter that the graph does not hold as integers.
    """
    model = open_model(source)
    if name_codes(parameter) not in model.graph.initializers:
        raise OptimizeError(f"no integers of {parameter}", where=place_of(source))
    return read_back(model, parameter, rows)
