"""Record of an ONNX graph, and the folder that load writes it to.

checkpoint/graph/graph.json             {"inputs", "outputs", "opset", "starts", "forms",
                                        "nodes": [Node, ...]}
checkpoint/graph/constants.safetensors  values that are not parameters: shapes, indices, scalars
checkpoint/graph/operators/<n>.onnx     a model of one node, for each that torch does not compute

Weights are in the checkpoint's own model.safetensors, as of any checkpoint. A node LINEAR or CONV
is a module with a weight: `module` names it, and its parameters are "<module>.weight" and ".bias".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

FOLDER = "graph"
MODEL_TYPE = "onnx"
LINEAR, CONV = "Linear", "Conv2d"
"""Operators of nodes that are modules."""
REFERENCE = "tensor:"
"""Beginning of an attribute that is a constant, before its name."""
BODY = "graph"
"""Attribute of the model that holds the modules, and the prefix of their names."""
PARTS = "parts"
"""Attribute of the model that holds the parts (parts.py)."""


@dataclass(frozen=True)
class Node:
    """Operator of a model that is an ONNX graph.

    inputs: names of tensors; "" for an input that is left out
    attributes: numbers, strings and lists of them; a tensor is stored as REFERENCE and the name of
        a constant
    module: name of its torch module; "" for none
    file: ONNX model of this operator alone, relative to the graph's folder; "" where torch computes
        it
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""
    module: str = ""
    file: str = ""


@dataclass(frozen=True)
class Graph:
    """Model that is an ONNX graph, with nodes in the order in which they run.

    folder: folder of the ONNX models of single operators
    parameters: {name: shape} of the tensors in model.safetensors
    starts: indices of the nodes at which the parts after the first begin (parts.py)
    custom_types: {tensor: (type, number of axes)} of the results of operators outside ONNX's own
        domain, which shape inference does not know
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opset: int
    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    folder: Path
    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    starts: tuple[int, ...] = ()
    custom_types: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the content of graph.json."""
        return {
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "opset": self.opset,
            "starts": list(self.starts),
            "forms": {name: list(both) for name, both in self.custom_types.items()},
            "nodes": [asdict(node) for node in self.nodes],
        }


def named_constants(attributes: Mapping[str, Any]) -> set[str]:
    """Return the names of the constants that the attributes of a loaded ONNX graph's node refer
    to."""
    values = (v for v in attributes.values() if isinstance(v, str) and v.startswith(REFERENCE))
    return {value.removeprefix(REFERENCE) for value in values}


def resolve(attributes: Mapping[str, Any], constants: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a node in a model's ONNX graph with the constants' values in place
    of their names."""
    return {
        key: constants[value.removeprefix(REFERENCE)]
        if isinstance(value, str) and value.startswith(REFERENCE)
        else value
        for key, value in attributes.items()
    }


def is_graph(checkpoint: Path) -> bool:
    """Return True for a checkpoint folder whose model is an ONNX graph."""
    return (checkpoint / FOLDER / "graph.json").is_file()


def read(checkpoint: Path, parameters: Mapping[str, tuple[int, ...]]) -> Graph:
    """Read the ONNX graph of a checkpoint folder as load wrote it.

    parameters: {name: shape} of its weights
    """
    from safetensors.torch import load_file

    folder = checkpoint / FOLDER
    document = json.loads((folder / "graph.json").read_text(encoding="utf-8"))
    nodes = tuple(
        Node(**{**n, "inputs": tuple(n["inputs"]), "outputs": tuple(n["outputs"])})
        for n in document["nodes"]
    )
    return Graph(
        tuple(document["inputs"]),
        tuple(document["outputs"]),
        int(document["opset"]),
        nodes,
        load_file(folder / "constants.safetensors"),
        folder,
        parameters,
        tuple(document["starts"]),
        {name: (kind, axes) for name, (kind, axes) in document["forms"].items()},
    )


def write(graph: Graph, checkpoint: Path) -> None:
    """Write graph.json and the constants of a model that is an ONNX graph below a checkpoint
    folder."""
    from safetensors.torch import save_file

    folder = checkpoint / FOLDER
    folder.mkdir(exist_ok=True)
    text = json.dumps(graph.to_json(), indent=1, sort_keys=True)
    (folder / "graph.json").write_text(text + "\n", encoding="utf-8")
    save_file(
        {n: t.contiguous() for n, t in graph.constants.items()}, folder / "constants.safetensors"
    )
