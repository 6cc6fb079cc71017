"""Lower a token embedding to 8 bits: rows of integers and of scales, looked up by the same ids.

    Gather(p [V, H], ids)   ->   Cast(Gather(p_codes, ids)) * Gather(p_scale, ids)

for a table of V rows of H values in G groups of g; by granularity:

 1. channel   p_codes [V, H] int8       p_scale [V, 1]
 2. group     p_codes [V, G, g] int8    p_scale [V, G, 1]      then Reshape to [.., H]
 3. tensor    p_codes [V, H] int8       p_scale []             which is not looked up

p_zero_point, int8 in p_scale's shape and looked up like it, is subtracted from the integers first
where the table has one. Rows lie as in the state, not transposed like a product's weight.

Plain ONNX operators of every runtime compute the state's value bit for bit: a difference of two
integers is exact in float32, and so is its product with a scale of QTensor's grid. Only the looked
up rows become float.

A tied head that stays float would keep the float table beside the integers, which is an
OptimizeError. Fewer bits would be stored as 8, because Gather accepts no type below a byte, so
targets/__init__.py refuses them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.names import GraphNames, Lookup
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState
from optimizer.lower.onnx.examine import take_over
from optimizer.lower.onnx.qdq import Surgeon, name_codes, scale_name, zero_point_name

IDS = "ids"  # activation of such a module in lowering.json


def lower(surgeon: Surgeon, names: GraphNames, state: CompressedState) -> dict[str, str]:
    """Lower every quantized embedding in place. Returns {module: IDS}, the entry of lowering.json.

    Raises OptimizeError naming a float module that shares its table.
    """
    tables = {n: entry for n, entry in names.lookups.items() if entry.parameter in state.weights}
    for name, entry in tables.items():
        for other, module in names.modules.items():
            if module.initializer == entry.initializer and module.parameter not in state.weights:
                raise OptimizeError(
                    f"{name} is quantized and {other}, which shares its values, stays float: the "
                    "file would hold both",
                    where="lower",
                    fix="Set quantize.head as well, or remove quantize.embedding.",
                )
        _one(surgeon, name, entry, state.weights[entry.parameter])
    return dict.fromkeys(tables, IDS)


def _one(surgeon: Surgeon, name: str, entry: Lookup, q: QTensor) -> None:
    parts = _parts(surgeon, entry.parameter, q)
    for node in entry.nodes:
        gather = surgeon.nodes[node]
        dequantized = _rows(surgeon, gather, name, q, *parts)
        take_over(gather.outputs[0], dequantized)
        surgeon.model.graph.remove(gather, safe=True)


def _parts(
    surgeon: Surgeon, parameter: str, q: QTensor
) -> tuple[ir.Value, ir.Value, ir.Value | None]:
    """Add the initializers of a quantized embedding's table to the graph that is lowered, in the
    layout of its granularity (cases 1 to 3). Returns integers, scale, and zero point or None.

    parameter: name of the table
    """
    rows, width = q.integers.shape
    grouped, groups = q.scheme.granularity == "group", q.scale.shape[1]
    shape = (rows, groups, width // groups) if grouped else (rows, width)
    scales: tuple[int, ...] = (rows, groups, 1) if grouped else (rows, 1)
    if q.scheme.granularity == "tensor":
        scales = ()
    zero: ir.Value | None = None
    if q.zero_point is not None:
        points = q.zero_point.numpy().reshape(scales)
        zero = surgeon.constant(zero_point_name(parameter), points)
    return (
        surgeon.integers(
            name_codes(parameter),
            parameter,
            ir.DataType.INT8,
            shape,
            lambda q: ir.tensor(q.integers.numpy().reshape(shape)),
        ),
        surgeon.number(scale_name(parameter), q.scale.numpy().reshape(scales)),
        zero,
    )


def _rows(
    surgeon: Surgeon,
    gather: ir.Node,
    name: str,
    q: QTensor,
    integers: ir.Value,
    scale: ir.Value,
    zero: ir.Value | None,
) -> ir.Value:
    """Insert the lookup of quantized rows in place of `gather`, whose ids are [batch, sequence].
    Returns the float rows [batch, sequence, H]."""
    label, ids = surgeon.fresh(f"{name}/rows"), gather.inputs[1]
    single = q.scheme.granularity == "tensor"

    def add(op: str, inputs: list[ir.Value | None], what: str, /, **attributes: object) -> ir.Value:
        return surgeon.insert(gather, op, inputs, f"{label}{what}", name, **attributes)

    def to_float(table: ir.Value, what: str) -> ir.Value:
        return add("Cast", [table], f"_{what}_float", to=int(ir.DataType.FLOAT))

    def take(table: ir.Value, what: str) -> ir.Value:
        return add("Gather", [table, ids], f"_{what}", axis=0)

    value = to_float(take(integers, "codes"), "codes")
    if zero is not None:
        points = zero if single else take(zero, "zero_point")
        value = add("Sub", [value, to_float(points, "zero_point")], "_moved")
    step = scale if single else take(scale, "scale")
    if q.scheme.granularity != "group":
        return add("Mul", [value, step], "")
    groups = add("Mul", [value, step], "_groups")
    shape = surgeon.constant(f"{name}/rows_shape", np.array([0, 0, q.integers.shape[1]], np.int64))
    return add("Reshape", [groups, shape], "")
