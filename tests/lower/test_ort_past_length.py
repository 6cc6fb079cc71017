from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from optimizer.lower import ort_attention, ort_past_length
from tests.lower.decoder_graphs import CONTEXT, answers, text
from tests.lower.test_ort_attention import Decoders


@pytest.fixture
def opt(decoders: Decoders) -> ir.Model:
    """Its positions are counted from the cache's shape."""
    model = decoders("flattened").model
    assert not ort_attention.fuse(model, CONTEXT).left
    return model


def test_past_and_present_may_then_be_one_buffer(opt: ir.Model) -> None:
    given, pieces = text(12, (0, 4)), (9, 1, 1, 1)
    wanted = answers(opt, given, pieces)
    assert ort_past_length.count(opt) == []
    assert np.array_equal(answers(opt, given, pieces, room=20), wanted)


def test_whoever_else_reads_the_cache_is_named(opt: ir.Model) -> None:
    past = next(v for v in opt.graph.inputs if v.name == "past_key_values.0.key")
    opt.graph.append(ir.node("Shape", [past], name="whole shape"))
    assert ort_past_length.count(opt) == ["whole shape"]
