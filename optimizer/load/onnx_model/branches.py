"""Warn of a module whose input joins branches of very different size.

One range covers the joined tensor, so a branch of small values gets few of its 255 steps: where a
detector joins boxes (0 to 640) and scores (0 to 1), the scores get none. Sizes are those of drawn
inputs; those of a recipe's data may differ, hence a warning and not an error.
"""

from __future__ import annotations

from typing import Any

import torch

from optimizer.foundation.progress import say
from optimizer.model.graph.module import GraphModel
from optimizer.model.graph.record import BODY, Node

FEWEST = 16  # steps of a range below which a branch has less than 4 bits
STEPS = 255
PASSED_ON = (
    *("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Relu", "MaxPool"),
)
"""Operators behind which the joined tensor has the same range."""


def warn(model: GraphModel, inputs: dict[str, torch.Tensor]) -> list[str]:
    """Warn of each module of a loaded ONNX graph that reads joined branches of very different size;
    return the sentences."""
    body: Any = model.get_submodule(BODY)
    joined: dict[str, tuple[str, list[float]]] = {}  # {tensor: (node, largest size per branch)}
    sentences: list[str] = []

    def look(node: Node, arguments: list[Any], _: tuple[torch.Tensor, ...]) -> None:
        if node.op == "Concat" and arguments[0].is_floating_point():
            sizes = [float(a.abs().max()) if a.numel() else 0.0 for a in arguments]
            joined[node.outputs[0]] = node.name, sizes
        elif node.inputs and node.inputs[0] in joined:
            name, sizes = joined[node.inputs[0]]
            if node.module and node.op not in PASSED_ON:
                small = min((s for s in sizes if s), default=0.0)
                steps = STEPS * small / max(sizes)
                if 0 < steps < FEWEST:
                    sentences.append(_sentence(node.module, name, sizes, steps))
            elif node.op in PASSED_ON:
                joined[node.outputs[0]] = joined[node.inputs[0]]

    body.observe = look
    with torch.no_grad():
        model(**inputs)
    body.observe = None
    for sentence in sentences:
        say(f"warning: {sentence}")
    return sentences


def _sentence(module: str, node: str, sizes: list[float], steps: float) -> str:
    shown = ", ".join(f"{size:.3g}" for size in sizes)
    return (
        f"{module} reads {node!r}, which joins branches of values up to {shown}: in one static "
        f"range the smallest has about {steps:.0f} of {STEPS} steps. If your data are like that, "
        f'add "{module}" to quantize.keep_float'
    )
