"""Quantize the operands of attentions without a zero point, as OpenVINO requires.

    query, key, value    QuantizeLinear(int8, symmetric range)     DequantizeLinear
    probabilities        QuantizeLinear(uint8, the range 0..1)     DequantizeLinear

Each pair is inserted between a linear layer or the softmax and the product that reads its output.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimizer.export.names import GraphNames
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.state import Range
from optimizer.lower.onnx.qdq import Surgeon


def is_signed(covered: Range) -> bool:
    """Test that an activation range is symmetric (zero point 128 of uint8), so that the lowered
    graph stores int8."""
    return covered.zero_point == 128


def lower(surgeon: Surgeon, names: GraphNames, ranges: Mapping[str, Range]) -> None:
    """Insert QuantizeLinear and DequantizeLinear at the operands of attentions in the graph that is
    lowered, in place.

    ranges: {module of names.operands: range}
    """
    for name, covered in ranges.items():
        use = names.operands.get(name)
        reader = None if use is None else surgeon.nodes.get(use.node)
        places = [
            i
            for i, v in enumerate(() if reader is None else reader.inputs)
            if use is not None and v is not None and v.name == use.input
        ]
        if reader is None or len(places) != 1 or covered.zero_point not in (0, 128):
            raise OptimizeError(
                f"the state has a range of {name}, {covered}, which is not around a product of "
                "attention in names.json, or has a zero point",
                where="lower",
                fix="Run the compress and export stages again.",
            )
        value = reader.inputs[places[0]]
        scale = surgeon.number(f"{name}/input_scale", covered.scale)
        kind = np.int8 if is_signed(covered) else np.uint8
        zero = surgeon.constant(f"{name}/input_zero_point", np.array(0, kind))
        codes = surgeon.insert(
            reader, "QuantizeLinear", [value, scale, zero], f"{name}/input_codes", name
        )
        read = surgeon.insert(
            reader, "DequantizeLinear", [codes, scale, zero], f"{name}/input", name
        )
        reader.replace_input_with(places[0], read)
