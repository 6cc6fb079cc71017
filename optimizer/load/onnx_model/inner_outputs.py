"""Make tensors inside an ONNX file its outputs, such as a detector's candidates before NMS."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import ModelProto, TensorProto, ValueInfoProto

from optimizer.foundation.errors import RecipeError, suggest


def cut(model: ModelProto, names: Sequence[str]) -> bool:
    """Make the tensors `names` the outputs of a model, and remove the nodes that none of them
    needs. Return False where all are outputs already, and nothing was changed.

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
    chosen = [typed.get(name) or _float_tensor(name) for name in dict.fromkeys(names)]
    needed, nodes = set(names), []
    for node in reversed(graph.node):
        if needed & {*node.output}:
            nodes.append(node)
            needed |= {*node.input, *_read_inside(node)}
    copies = [(type(one).FromString(one.SerializeToString())) for one in chosen]
    kept = [type(node).FromString(node.SerializeToString()) for node in reversed(nodes)]
    del graph.output[:], graph.node[:]
    graph.output.extend(copies)
    graph.node.extend(kept)
    tensors = [t for t in graph.initializer if t.name in needed]
    if len(tensors) < len(graph.initializer):
        left = [type(t).FromString(t.SerializeToString()) for t in tensors]
        del graph.initializer[:]
        graph.initializer.extend(left)
    return True


def _float_tensor(name: str) -> ValueInfoProto:
    """A tensor of float32; ONNX Runtime refuses the file if it has another type."""
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = TensorProto.FLOAT
    return value


def _read_inside(node: object) -> set[str]:
    """Names that the graphs inside a node (If, Loop) read."""
    names: set[str] = set()
    for attribute in node.attribute:  # type: ignore[attr-defined]
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            for inner in graph.node:
                names |= {*inner.input, *_read_inside(inner)}
    return names
