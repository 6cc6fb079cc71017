"""Cut a graph at the inputs and outputs of its linear modules.

Run alone, a piece is given the tensors that the reference computed at the cut, so an error
cannot hide behind those before it, nor be blamed on those after it. Nothing is marked as an extra
output of the whole graph, which would stop a runtime from fusing across it.

    quantizers   side by side, the input of every module that quantizes it -> its integers (and,
                 per token, the step of each row)
    products     side by side, what every linear module multiplies -> its output: the integers,
                 where it has any, or its float input
    rest         everything else: model inputs and every module's output -> every module's input
                 and the model outputs

Works on float and lowered graphs alike: nodes carry the module they came from in their metadata
(export/passes/clean.py), and what a lowering inserted carries the module it was inserted for.
Products that a lowering packed into one are looked at unpacked (lower/ort/pack.py).
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
from optimizer.lower.onnx.graph_source import Opened, Source, model_of, place_of
from optimizer.lower.onnx.qdq import codes_name, read_back, scale_name
from optimizer.lower.ort import product as ort_product
from optimizer.lower.ort.sequence_first import is_sequence_first

OF_INTEGERS = ("MatMulInteger", ort_product.OPERATOR)
PRODUCTS = ("MatMul", "Gemm", convolution.OPERATOR, *OF_INTEGERS)
LAYOUT = ("Reshape", "Unsqueeze", "Squeeze", "Identity")  # the same integers in another shape


@dataclass(frozen=True)
class Edge:
    """One use of a linear module: the float tensors that enter and leave it, and their ranks.

    A model may have flattened (batch, sequence, width) to rank 2. integers: what its input is
    quantized to, "" where it stays float; step: the tensor that holds the step of each row, where
    that is computed at run time; both have integers_rank. sides: (top, left, bottom, right), how
    much larger an image the integers are, padded with that of 0. multiplies: False of what a
    residual add or pooling reads. convolves: its input is images, (image, channel, row, column).
    sequence_first: what enters and leaves is (sequence, batch, width) there.
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
    """What a graph says about itself that outputs alone might not show.

    by_column: its attentions number positions by the cache's columns, not by position_ids, so that
    the keys of a row padded on the left are turned by its padding (lower/ort/attention.py).
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    epsilons: dict[str, tuple[float, ...]]  # {module: of each of its norms}
    gelus: dict[str, str]  # {module: "none" (erf) or "tanh"} of each Gelu
    by_column: bool = False


def summary(source: Source) -> GraphSummary:
    """Of a graph on disk, only its operators are read where its weights lie beside it."""
    model = source.model if isinstance(source, Opened) else onnx_file.load(source)
    graph = model.graph
    inputs = tuple(str(v.name) for v in graph.inputs)
    by_column = any(n.op_type == "GroupQueryAttention" for n in graph)
    outputs = tuple(str(v.name) for v in graph.outputs)
    gelus = {
        module_of(n): n.attributes.get_string("approximate", "none")
        for n in graph
        if n.op_type == "Gelu"
    }
    return GraphSummary(inputs, outputs, norm_epsilons.epsilons(graph), gelus, by_column)


def edges(source: Source, modules: Collection[str], summands: Collection[str] = ()) -> list[Edge]:
    """Every use of every linear module in graph order; `modules` names all of them. Then what
    residual adds read, of `summands`.

    Raises OptimizeError naming a module that the graph does not multiply by.
    """
    model = model_of(source)
    products = [
        n for n in model.graph if n.op_type in PRODUCTS and owned(n, modules) and weighted(n)
    ]
    missing = sorted(set(modules) - {module_of(n) for n in products})
    if missing:
        raise OptimizeError(f"no operator of {missing[0]} multiplies", where=place_of(source))
    outputs = {n: _leaving(n) for n in products}
    cuts = []
    for product in products:
        entering = _entering(product, modules, set(outputs.values()))
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
    """From the float tensor that its operators read to the one that they give."""
    own = summand_operators(model, module)
    inside = {v for n in own for v in n.outputs}
    inputs = [n.inputs[0] for n in own if n.inputs[0] not in inside]
    outputs = [v for v in inside if not any(module_of(n) == module for n, _ in v.uses())]
    coded = [n.outputs[0] for n in own if n.op_type == "QuantizeLinear"]
    if not len(inputs) == len(outputs) == len(coded) == 1 or inputs[0] is None:
        raise OptimizeError(f"what {module} hands on is not quantized once", where="cut")
    if not outputs[0].uses():
        raise OptimizeError(f"nothing reads the integers of what {module} hands on", where="cut")
    x, y, rank = str(inputs[0].name), str(outputs[0].name), _rank(inputs[0])
    return Edge(module, x, y, rank, rank, str(coded[0].name), "", rank, multiplies=False)


def summand_operators(model: ir.Model, module: str) -> list[ir.Node]:
    """Those of a module in front of a residual add, and the QuantizeLinear that it may share."""
    own = [n for n in model.graph if module_of(n) == module]
    makers = [
        n.inputs[0].producer() for n in own if n.op_type == "DequantizeLinear" and n.inputs[0]
    ]
    return [*(q for q in makers if q is not None and q not in own), *own]


def owned(node: ir.Node, modules: Collection[str]) -> bool:
    """Whether it came from one of the modules."""
    return module_of(node) in modules


def weighted(node: ir.Node) -> bool:
    """Whether the second operand is an initializer, perhaps behind operators on it alone."""
    value = node.inputs[1]
    while value is not None and not value.is_initializer():
        producer = value.producer()
        if producer is None:
            return False
        value = producer.inputs[0]
    return value is not None


def _leaving(product: ir.Node) -> ir.Value:
    """Follow the product through what its module adds: rescaling, and the bias."""
    node = product
    while True:
        users = [n for n, _ in node.outputs[0].uses()]
        same = len(users) == 1 and module_of(users[0]) == module_of(product)
        if not same or users[0].op_type == "Reshape":  # back to rank 3, by run-time sizes
            return node.outputs[0]
        node = users[0]


def _entering(product: ir.Node, modules: Collection[str], leaving: set[ir.Value]) -> ir.Value:
    """Go back from the product through what a lowering put before it, to the float tensor that is
    read. Operand 0 is the data."""
    value = product.inputs[0]
    assert value is not None
    while value not in leaving:
        node = value.producer()
        if node is None or not owned(node, modules) or not node.inputs:
            break
        before = node.inputs[0]
        assert before is not None
        value = before
    return value


def _quantized(product: ir.Node, entering: ir.Value) -> tuple[str, str, int, tuple[int, ...]]:
    """(integers, step, integers_rank, sides) of an Edge: the integers that are multiplied or
    dequantized, so that what is done to them after QuantizeLinear belongs to the quantizer."""
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
            return str(integers.name), name, _rank(node.inputs[0]), _sides(node.inputs[0])
        moved = value is integers and node.op_type in LAYOUT
        if node.op_type == "DequantizeLinear" or moved:
            integers = node.inputs[0]
        value = node.inputs[0]
    return "", "", 0, ()


def _sides(value: ir.Value | None) -> tuple[int, ...]:
    """Of the image that a quantizer reads, if that is padded."""
    node = None if value is None else value.producer()
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
    """Write to `out` the part of the graph at `source` between these tensors."""
    model = model_of(source)
    piece = ir.convenience.extract(model.graph, list(inputs), list(outputs))
    for value in piece.inputs:
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
    onnx_file.save(ir.Model(piece, ir_version=model.ir_version), out)


def write_quantizers(source: Source, at: Sequence[Edge], out: Path) -> None:
    """Piece "quantizers" of those in `at` that have one."""
    with_one = [e for e in at if e.integers]
    results = [t for e in with_one for t in (e.integers, e.step) if t]
    cut(source, list(dict.fromkeys(e.input for e in with_one)), list(dict.fromkeys(results)), out)


def apart(at: Sequence[Edge]) -> list[list[Edge]]:
    """`at` in as few parts as keep every module's output from being an input of the same piece,
    which would answer for it: linear modules that follow each other directly; and that read no
    float tensor as different integers."""
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
    """Piece "products" of modules that are `apart`. quantizers: with what makes their integers of
    floats."""
    inputs = [
        t
        for e in at
        for t in ((e.integers, e.step) if e.integers and not quantizers else (e.input,))
        if t
    ]
    cut(source, list(dict.fromkeys(inputs)), [e.output for e in at], out)


def write_rest(source: Source, at: Sequence[Edge], out: Path) -> None:
    """Piece "rest"."""
    interface = summary(source)
    needed = dict.fromkeys([*(e.input for e in at), *interface.outputs])
    inputs = [*interface.inputs, *(e.output for e in at)]
    both = [w for w in needed if w not in inputs]
    cut(source, inputs, both, out)


def initializers(source: Source, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """The values of these initializers. Raises OptimizeError naming one the graph lacks."""
    by_name = model_of(source).graph.initializers
    arrays = {}
    for name in names:
        value = by_name.get(name)
        if value is None or value.const_value is None:
            raise OptimizeError(f"no initializer {name!r}", where=place_of(source))
        arrays[name] = value.const_value.numpy()
    return arrays


def initializers_among(source: Source, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """The values of those initializers that the graph has."""
    known = model_of(source).graph.initializers
    return initializers(source, [name for name in names if name in known])


def float_weights(source: Source, modules: Collection[str]) -> list[str]:
    """Those of `modules` whose product multiplies by a float initializer, not by codes, or that
    look rows of one up."""
    wrong = set()
    for node in model_of(source).graph:
        if node.op_type == "Gather" and owned(node, modules):
            table = node.inputs[0]
            scale = scale_name(f"{module_of(node)}.weight")
            if (
                table is not None
                and table.is_initializer()
                and table.name != scale
                and _float(table)
            ):
                wrong.add(module_of(node))
        if node.op_type not in PRODUCTS or not owned(node, modules) or not weighted(node):
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


def changed(before: Source, after: Source, names: Iterable[str]) -> list[str]:
    """Those of `names` that are initializers of both graphs, with different values."""
    a, b = (model_of(p).graph.initializers for p in (before, after))
    wrong = []
    for name in sorted(set(names) & set(a) & set(b)):
        x, y = a[name].const_value, b[name].const_value
        if x is None or y is None or x.dtype != y.dtype or x.tobytes() != y.tobytes():
            wrong.append(name)
    return wrong


def dequantized(source: Source, parameters: Iterable[str]) -> dict[str, NDArray[Any]]:
    """{parameter: float32 value (out, in)} from the codes and scales of a lowered graph.

    Raises OptimizeError naming a parameter that the graph does not hold as codes.
    """
    model = model_of(source)
    arrays = {}
    for name in parameters:
        if codes_name(name) not in model.graph.initializers:
            raise OptimizeError(f"no codes of {name}", where=place_of(source))
        arrays[name] = read_back(model, name)
    return arrays
