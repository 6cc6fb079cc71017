from __future__ import annotations

import numpy as np

from optimizer.export.passes.node_names import name_nodes
from optimizer.export.scopes import SCOPES, module_of
from tests.export.graphs import graph


def test_nodes_and_values_are_named_by_module_and_operator() -> None:
    model = graph(
        "g (float[n, 3] x) => (float[n, 3] y) { a = Relu(x) b = Relu(a) y = Add(b, c) }",
        c=np.ones(3, np.float32),
    )
    for node in model.graph:
        node.metadata_props[SCOPES] = "['', 'model', 'model.layer.0', 'relu']"
    name_nodes(model, set())
    assert [n.name for n in model.graph] == ["layer.0/Relu", "layer.0/Relu_1", "layer.0/Add"]
    assert [n.outputs[0].name for n in model.graph] == ["layer.0/Relu:0", "layer.0/Relu_1:0", "y"]
    assert list(model.graph.initializers) == ["constant_0"]
    assert module_of(next(iter(model.graph))) == "layer.0"
