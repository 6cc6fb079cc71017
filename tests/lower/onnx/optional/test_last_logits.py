"""A run chooses if it wants the logits of all tokens or of the last; both are the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from optimizer.lower.onnx.optional import last_logits
from tests.lower.decoder_graphs import Decoder, text
from tests.lower.running import difference, session


@pytest.mark.parametrize("kind", ["llama", "flattened"])
def test_the_last_tokens_logits_are_those_of_a_run_of_all(
    kind: str, decoders: Callable[[str], Decoder]
) -> None:
    model, given = decoders(kind).model, text(9, (0, 3))
    assert last_logits.add(model) == ""
    run = session(ir.to_proto(model).SerializeToString())
    assert "first_scored" not in [i.name for i in run.get_inputs()]
    arrays = {"input_ids": given.ids, "attention_mask": given.mask}
    arrays["position_ids"] = np.maximum(given.mask.cumsum(1) - 1, 0)
    for value in run.get_inputs():
        if value.name.startswith("past_key_values."):
            arrays[value.name] = np.zeros((2, value.shape[1], 0, value.shape[3]), np.float32)
    arrays = {i.name: arrays[i.name] for i in run.get_inputs()}
    (every,) = run.run(["logits"], arrays)
    (last,) = run.run(["logits"], {**arrays, "first_scored": np.array([-1])})
    assert every.shape[1] == 9
    assert last.shape[1] == 1
    assert difference(last, every[:, -1:]) < 3e-6


def test_logits_of_another_form_are_left_as_they_are(decoders: Callable[[str], Decoder]) -> None:
    model = decoders("llama").model
    logits = next(v for v in model.graph.outputs if v.name == "logits")
    node = ir.node("Softmax", [logits], {"axis": -1})
    model.graph.append(node)
    logits.name, node.outputs[0].name = None, "logits"
    model.graph.outputs[[*model.graph.outputs].index(logits)] = node.outputs[0]
    assert "not a product" in last_logits.add(model)
