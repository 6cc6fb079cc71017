"""Make tensors inside an ONNX file its outputs, such as a detector's candidates before NMS."""

from __future__ import annotations

import copy
from collections.abc import Sequence

from onnx import ModelProto, TensorProto, ValueInfoProto

from optimizer.foundation.errors import RecipeError, suggest


def cut(model: ModelProto, names: Sequence[str]) -> bool:
    """Make the inner tensors `names` the outputs of an ONNX file that is loaded, and remove the
    nodes and inputs that none of them needs. Return False where all are outputs already, and
    nothing was changed.

    names: model.outputs of the recipe

    Raises RecipeError for a name that no node makes.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.output}
    if all(name in outputs for name in names):
        return False
    makers = {tensor: node for node in graph.node for tensor in node.output if tensor}
    unknown = [name for name in names if name not in makers]
    if unknown:
        raise RecipeError(
            f"no node of the file makes a tensor {unknown[0]!r}"
            f"{suggest(unknown[0], [*outputs, *makers])}",
            where="model.outputs",
            accepted=f"{', '.join(outputs)}; or a tensor that a node makes",
        )
    typed = outputs | {value.name: value for value in graph.value_info}
    chosen = [copy.deepcopy(typed.get(n) or _float_tensor(n)) for n in dict.fromkeys(names)]
    del graph.output[:]
    graph.output.extend(chosen)
    needed = set(names)
    for at in reversed(range(len(graph.node))):
        if needed & {*graph.node[at].output}:
            needed |= {*graph.node[at].input}
        else:
            del graph.node[at]
    for values in (graph.initializer, graph.input):
        for at in reversed(range(len(values))):
            if values[at].name not in needed:
                del values[at]
    return True


def _float_tensor(name: str) -> ValueInfoProto:
    """Declare a float32 tensor of a loaded ONNX file as its output; ONNX Runtime refuses the file
    if it has another type."""
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = TensorProto.FLOAT
    return value
