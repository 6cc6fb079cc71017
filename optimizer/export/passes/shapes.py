"""Replace shapes computed at run time by constants.

Uses the symbolic shapes that torch.export proved. A dimension is a number or an expression of the
dynamic axes ("batch", "sequence + past").

 1. Reshape(x, computed)   the target's dimensions are numbers, or those of x at the same place
                           (0), and at most one is neither (-1)
 2. Expand(x, computed)    a dimension that x has already is 1, any other is a number
 3. Expand                 is removed where it changes nothing
Other operators stay as they are.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

Dims = list[int | str | None]


def simplify_shapes(model: ir.Model) -> None:
    """Simplify an exported graph: replace the computed targets of Reshape and Expand by constants,
    in place. Nodes that no longer reach an output are left for a later pass."""
    for node in list(model.graph):
        if node.op_type not in ("Reshape", "Expand") or _is_constant(node.inputs[1]):
            continue
        source, result = _dims(node.inputs[0]), _dims(node.outputs[0])
        if source is None or result is None:
            continue
        target = _reshape(source, result) if node.op_type == "Reshape" else _expand(source, result)
        if target is None:
            continue
        if node.op_type == "Expand" and set(target) == {1} and len(source) == len(result):
            assert node.inputs[0] is not None
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
            continue
        node.replace_input_with(1, _constant(model, target))
        if node.op_type == "Reshape":
            node.attributes["allowzero"] = ir.AttrInt64("allowzero", 0)


def _reshape(source: Dims, result: Dims) -> list[int] | None:
    """Return the constant target by which a Reshape's computed one in an exported graph can be
    replaced (case 1), or None."""
    target = []
    for i, dim in enumerate(result):
        same = i < len(source) and dim is not None and dim == source[i]
        target.append(dim if isinstance(dim, int) else 0 if same else -1)
    if target.count(-1) > 1 or 0 in [d for d, w in zip(target, result, strict=True) if w == d]:
        return None
    return target


def _expand(source: Dims, result: Dims) -> list[int] | None:
    """Return the constant target by which an Expand's computed one in an exported graph can be
    replaced (case 2), or None."""
    aligned: Dims = [*[1] * (len(result) - len(source)), *source]
    target: list[int] = []
    for size, dim in zip(aligned, result, strict=True):
        if dim is not None and dim == size:
            target.append(1)
        elif isinstance(dim, int):
            target.append(dim)
        else:
            return None
    return target


def _is_constant(value: ir.Value | None) -> bool:
    return value is None or value.const_value is not None


def _dims(value: ir.Value | None) -> Dims | None:
    if value is None or value.shape is None:
        return None
    return [d if isinstance(d, int) else d.value for d in value.shape]


def _constant(model: ir.Model, numbers: list[int]) -> ir.Value:
    """Return the exported graph's initializer with these numbers, which all operators that need
    them share."""
    name = "shape_" + "_".join(map(str, numbers)).replace("-", "m")
    value = model.graph.initializers.get(name)
    if value is None:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
        model.graph.register_initializer(value)
    return value
