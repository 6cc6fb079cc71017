from __future__ import annotations

import re

import onnx_ir as ir
import pytest

from optimizer.export.passes import Pass, run
from optimizer.foundation.errors import OptimizeError
from tests.export.graphs import graph

MODEL = "g (float[n] x) => (float[n] y) { y = Relu(x) }"


def nothing(_: ir.Model) -> None:
    pass


def is_named(model: ir.Model) -> bool:
    return model.graph.name == "named"


def name(model: ir.Model) -> None:
    model.graph.name = "named"


def test_a_pass_on_a_graph_that_lacks_what_it_requires_is_refused() -> None:
    with pytest.raises(OptimizeError, match=re.escape("not what pass 'second' needs")):
        run(graph(MODEL), [Pass("first", nothing), Pass("second", name, requires=is_named)])


def test_a_pass_that_does_not_establish_what_it_ensures_is_refused() -> None:
    with pytest.raises(OptimizeError, match="'idle' left its work undone"):
        run(graph(MODEL), [Pass("idle", nothing, ensures=is_named)])


def test_passes_whose_contracts_hold_run_in_order() -> None:
    model = graph(MODEL)
    run(model, [Pass("name", name, ensures=is_named), Pass("use", nothing, requires=is_named)])
    assert is_named(model)
