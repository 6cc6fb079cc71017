"""Graph surgery of both Q/DQ dialects: a weight becomes integers and a scale.

Initializers of a quantized parameter `p`, by granularity (K inputs, N outputs):

    channel    p_codes [K, N] int8    p_scale [N]          DequantizeLinear axis=1
    tensor     p_codes [K, N] int8    p_scale []           DequantizeLinear
    group      p_codes [K, N] int4/8  p_scale [groups, N]  DequantizeLinear axis=0, block_size

    (a convolution's: convolution.py)

plus p_zero_point in p_scale's shape where the dialect has one; an embedding's are not transposed
(lookup.py). A second copy of the three ends in "_1". New nodes and values are named after the
module: "<module>/weight", "<module>/input_codes", ...
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from torch import Tensor

from optimizer.export.names import GraphNames, ModuleInGraph
from optimizer.export.scopes import MODULE
from optimizer.foundation import packing
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import QTensor

Array = NDArray[Any]


def name_codes(parameter: str) -> str:
    return f"{parameter}_codes"


def scale_name(parameter: str) -> str:
    return f"{parameter}_scale"


def zero_point_name(parameter: str) -> str:
    return f"{parameter}_zero_point"


def _numbered(name: str, copy: int) -> str:
    return f"{name}_{copy}" if copy else name


@dataclass
class Surgeon:
    """Graph being lowered in place, with nodes by name.

    float_type: numpy's name of the graph's float type
    weights: quantized weights of the state, opened again when their integers are written
    inputs: {(tensor, quantization): quantized activation}, shared by modules with the same key
    """

    model: ir.Model
    float_type: str = "float32"
    weights: Mapping[str, QTensor] = field(default_factory=dict)
    nodes: dict[str, ir.Node] = field(init=False)
    inputs: dict[tuple[object, ...], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {str(n.name): n for n in self.model.graph}
        self._taken: dict[str, int] = {}

    def products(self, module: ModuleInGraph) -> list[ir.Node]:
        """List the operators of the lowered graph that multiply by the module's weight;
        OptimizeError for a missing one."""
        names = [module.node, *(use.node for use in module.also)]
        missing = [n for n in names if n not in self.nodes]
        if missing:
            raise OptimizeError(f"names.json names {missing[0]!r}; the graph has no such node")
        return [self.nodes[n] for n in names]

    def constant(self, name: str, tensor: Array | ir.TensorProtocol) -> ir.Value:
        """Return the initializer `name` of the lowered graph, made on first use."""
        existing = self.model.graph.initializers.get(name)
        if existing is not None:
            return existing
        stored = ir.tensor(tensor, name=name) if isinstance(tensor, np.ndarray) else tensor
        value = ir.val(name, stored.dtype, stored.shape, const_value=stored)
        self.model.graph.register_initializer(value)
        return value

    def integers(
        self,
        name: str,
        parameter: str,
        dtype: ir.DataType,
        shape: tuple[int, ...],
        layout: Callable[[QTensor], ir.TensorProtocol],
    ) -> ir.Value:
        """Return the initializer `name` of the lowered graph, made on first use, with the integers
        of a parameter.

        They are read when the graph is written, so that one weight is in memory at a time.

        dtype, shape: those of `layout`'s tensor
        layout: function from the weight to its tensor in the file
        """

        def read() -> ir.TensorProtocol:
            return layout(self.weights[parameter])

        return self.constant(name, ir.LazyTensor(read, dtype, ir.Shape(shape), name=name))

    def fresh(self, name: str) -> str:
        """Return a name for a new node of the lowered graph: `name`, or `name_1`, ... for a module
        that the graph uses more than once."""
        count = self._taken[name] = self._taken.get(name, -1) + 1
        return f"{name}_{count}" if count else name

    def insert(
        self,
        before: ir.Node,
        op: str,
        inputs: list[ir.Value | None],
        output: str,
        module: str,
        /,
        **attributes: Any,
    ) -> ir.Value:
        """Insert a node into the graph that is lowered, in front of `before`. Returns its output;
        both are named `output`."""
        node = ir.node(op, inputs, attributes, name=output, metadata_props={MODULE: module})
        node.outputs[0].name = output
        self.model.graph.insert_before(before, node)
        self.nodes[output] = node
        return node.outputs[0]

    def number(self, name: str, value: float | Array) -> ir.Value:
        """Return an initializer of the lowered graph with one number in the graph's float type."""
        return self.constant(name, np.asarray(value, self.float_type))

    def finish(self) -> None:
        """Remove from the lowered graph unused nodes and initializers (the float weights), and sort
        nodes."""
        from onnx_ir.passes.common import RemoveUnusedNodesPass

        RemoveUnusedNodesPass()(self.model)
        self.model.graph.sort()


def add_weight(
    surgeon: Surgeon, parameter: str, q: QTensor, unsigned: bool = False, copy: int = 0
) -> tuple[ir.Value, ir.Value, ir.Value | None, dict[str, int]]:
    """Add a quantized weight's initializers to the graph that is lowered.

    Returns integers, scale, zero point or None, and the attributes of a DequantizeLinear of them.
    unsigned: True to count integers and zero point from the lowest (only with a zero point)
    copy: number of the copy of a weight that is stored several times
    Raises OptimizeError where a scale is not exact in the graph's float type.
    """
    scale = packing.to_kn(q.scale.numpy())
    stored: Array = scale.astype(surgeon.float_type)
    if not np.array_equal(stored.astype(np.float32), scale):
        raise OptimizeError(f"{parameter}: a scale is not exact in {surgeon.float_type}")
    attributes, shape = _granularity(q, scale)
    zero: ir.Value | None = None
    if q.zero_point is not None:
        points = packing.to_kn(q.zero_point.numpy()).reshape(shape)
        kind = _integer_tensor(points, q.scheme.bits, unsigned)
        zero = surgeon.constant(_numbered(zero_point_name(parameter), copy), kind)
    return (
        surgeon.integers(
            _numbered(name_codes(parameter), copy),
            parameter,
            _integer_type(q.scheme.bits, unsigned),
            tuple(q.integers.shape[::-1]),
            lambda q: _integer_tensor(packing.to_kn(q.integers.numpy()), q.scheme.bits, unsigned),
        ),
        surgeon.constant(_numbered(scale_name(parameter), copy), stored.reshape(shape)),
        zero,
        attributes,
    )


def _granularity(q: QTensor, scale: Array) -> tuple[dict[str, int], tuple[int, ...]]:
    """Return the attributes of a DequantizeLinear for q's granularity, and the shape of its
    scale."""
    if q.scheme.granularity == "tensor":
        return {}, ()
    if q.scheme.granularity == "channel":
        return {"axis": 1}, (scale.shape[1],)
    assert q.scheme.group_size is not None
    return {"axis": 0, "block_size": q.scheme.group_size}, scale.shape


def _integer_type(bits: int, unsigned: bool) -> ir.DataType:
    if bits == 8:
        return ir.DataType.UINT8 if unsigned else ir.DataType.INT8
    return ir.DataType.UINT4 if unsigned else ir.DataType.INT4


def _integer_tensor(integers: Array, bits: int, unsigned: bool) -> ir.TensorProtocol:
    if bits == 8:
        return ir.tensor(packing.to_unsigned(integers, 8) if unsigned else integers.astype(np.int8))
    if unsigned:
        packed = packing.pack4_unsigned(packing.to_unsigned(integers, 4))
    else:
        packed = packing.pack4(integers)
    return ir.PackedTensor(packed, _integer_type(bits, unsigned), shape=integers.shape)


def dequantize_weight(
    surgeon: Surgeon,
    before: ir.Node,
    name: str,
    parameter: str,
    q: QTensor,
    unsigned: bool = False,
    copy: int = 0,
    zero_points: bool = True,
) -> ir.Value:
    """Insert a DequantizeLinear of the weight before that node of the lowered graph and return the
    float value.

    zero_points: True to write zero points of 8-bit weights that are 0. On processors without VNNI,
        ONNX Runtime turns int8 weights into uint8 for exact products (session.x64quantprecision)
        and then fails on a DequantizeLinear with several scales and no zero points, unless it
        fuses it into an integer product.
    """
    filters = before.inputs[1].shape if before.op_type == "Conv" and before.inputs[1] else None
    if filters is not None:
        shape = tuple(filters.numpy())
        integers = surgeon.constant(name_codes(parameter), q.integers.numpy().reshape(shape))
        scale = surgeon.number(scale_name(parameter), q.scale[:, 0].numpy())
        zero, attributes = None, {"axis": 0}
    else:
        integers, scale, zero, attributes = add_weight(surgeon, parameter, q, unsigned, copy)
    if zero_points and zero is None and q.scheme.bits == 8 and scale.shape:
        zeros = np.zeros(tuple(scale.shape.numpy()), np.int8)
        zero = surgeon.constant(_numbered(zero_point_name(parameter), copy), zeros)
    operands = [integers, scale] if zero is None else [integers, scale, zero]
    label = surgeon.fresh(f"{name}/weight")
    return surgeon.insert(before, "DequantizeLinear", [*operands], label, name, **attributes)


def apply_factor(surgeon: Surgeon, product: ir.Node, name: str, factor: Tensor | None) -> ir.Value:
    """Return the first operand of a product in the lowered graph for quantization, multiplied per
    feature by `factor` unless it is None."""
    x = product.inputs[0]
    assert x is not None
    if factor is None:
        return x
    values = factor.numpy()
    key = (x, values.tobytes())
    if key not in surgeon.inputs:
        label = surgeon.fresh(f"{name}/factored")
        multiplier = surgeon.number(f"{label}_factor", values)
        surgeon.inputs[key] = surgeon.insert(product, "Mul", [x, multiplier], label, name)
    product_input: ir.Value = surgeon.inputs[key]
    return product_input


def find_quantized_modules(
    model: ir.Model, names: GraphNames, weights: Collection[str]
) -> dict[str, ModuleInGraph]:
    """Return {name: module} of the modules of an exported graph whose weight is in `weights` and is
    to be lowered, in graph order.
    Raises OptimizeError for a weight that no module of names.json holds.
    """
    position = {str(n.name): i for i, n in enumerate(model.graph)}
    modules = {n: m for n, m in names.modules.items() if m.parameter in weights}
    orphans = set(weights) - {m.parameter for m in modules.values()}
    if orphans:
        raise OptimizeError(
            f"{min(orphans)} is quantized in the state, and no module of names.json holds it",
            where="lower",
        )
    return dict(sorted(modules.items(), key=lambda entry: position.get(entry[1].node, -1)))


def read_back(model: ir.Model, parameter: str, rows: slice = slice(None)) -> Array:
    """Read the float32 value (out, in) of a weight from its initializers in a lowered graph, or of
    some of its rows.

    Integers are unpacked by onnx_ir, independently of foundation/packing.py. Integers that a Gather
    reads are an embedding's, not transposed. Raises OptimizeError where copies differ.
    """
    tensors = model.graph.initializers
    _check_copies(tensors, parameter)
    integers = _values(tensors[name_codes(parameter)])
    scale = _values(tensors[scale_name(parameter)]).astype(np.float32)
    zero = tensors.get(zero_point_name(parameter))
    points = np.zeros_like(scale) if zero is None else _values(zero).astype(np.float32)
    if any(n.op_type == "Gather" for n, _ in tensors[name_codes(parameter)].uses()):
        scale, points = (a[rows] if a.ndim else a for a in (scale, points))
        by_row: Array = (integers[rows].astype(np.float32) - points) * scale
        return by_row.reshape(len(by_row), -1)
    if integers.ndim == 4:
        filters = integers[rows].astype(np.float32)
        by_filter: Array = filters.reshape(len(filters), -1) * scale[rows, None]
        return by_filter
    columns = integers[:, rows].astype(np.float32)
    scale, points = (a[..., rows] if a.ndim else a for a in (scale, points))
    if scale.ndim == 2:
        repeat = columns.shape[0] // scale.shape[0]
        scale, points = np.repeat(scale, repeat, 0), np.repeat(points, repeat, 0)
    return packing.from_kn((columns - points) * scale)


def _values(initializer: ir.Value) -> Array:
    assert initializer.const_value is not None
    array: Array = initializer.const_value.numpy()
    return array


def _check_copies(tensors: Mapping[str, ir.Value], parameter: str) -> None:
    for name in (name_codes(parameter), scale_name(parameter), zero_point_name(parameter)):
        for copy in itertools.count(1):
            other = tensors.get(_numbered(name, copy))
            if other is None:
                break
            if not np.array_equal(_values(other), _values(tensors[name])):
                raise OptimizeError(
                    f"{other.name} differs from {name}, the same weight in another operator"
                )


def release(model: ir.Model, parameter: str) -> None:
    """Close the external files of a lowered graph's weight that was read back, and free its
    unpacked integers."""
    for name, initializer in model.graph.initializers.items():
        tensor = initializer.const_value
        if name.startswith(f"{parameter}_") and isinstance(tensor, ir.ExternalTensor):
            tensor.release()
