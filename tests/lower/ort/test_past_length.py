from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from optimizer.lower.onnx.examine import DecoderExamples, evaluate
from optimizer.lower.ort import attention, past_length
from tests.lower.decoder_graphs import CONTEXT, answers, text
from tests.lower.ort.test_attention import Decoders


@pytest.fixture
def opt(decoders: Decoders) -> ir.Model:
    """Its positions are counted from the cache's shape."""
    model = decoders("flattened").model
    assert not attention.fuse(model, CONTEXT).left
    return model


def positions(model: ir.Model, mask: np.ndarray, past: int) -> list[list[int]]:
    """Of each row's new tokens."""
    learned = next(n for n in model.graph if str(n.name).endswith("embed_positions/Add"))
    rows: list[list[int]] = evaluate(
        model, learned.inputs[0], DecoderExamples(model, mask, past)
    ).tolist()  # type: ignore[arg-type]
    return rows


def test_past_and_present_may_then_be_one_buffer(opt: ir.Model) -> None:
    given, pieces = text(12, (0, 4)), (9, 1, 1, 1)
    wanted = answers(opt, given, pieces)
    assert past_length.measure_by_row(opt) == []
    assert np.array_equal(answers(opt, given, pieces, room=20), wanted)


def test_a_row_shorter_than_its_batch_has_the_position_of_its_own_token(opt: ir.Model) -> None:
    past_length.measure_by_row(opt)
    mask = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 0, 0]])
    assert positions(opt, mask, past=5) == [[5], [2], [1]]


def test_a_first_prompt_padded_on_the_right_has_the_positions_from_its_start(
    opt: ir.Model,
) -> None:
    past_length.measure_by_row(opt)
    mask = np.array([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert positions(opt, mask, past=0) == [[0, 1, 2, 3], [0, 1, -1, -1]]


def test_whoever_else_reads_the_cache_is_named(opt: ir.Model) -> None:
    past = next(v for v in opt.graph.inputs if v.name == "past_key_values.0.key")
    opt.graph.append(ir.node("Shape", [past], name="whole shape"))
    assert past_length.measure_by_row(opt) == ["whole shape"]


def test_positions_that_depend_on_other_rows_are_named(opt: ir.Model) -> None:
    counted = next(n for n in opt.graph if n.op_type == "CumSum")
    along_rows = ir.val("along_rows", const_value=ir.tensor(np.array(0), name="along_rows"))
    opt.graph.register_initializer(along_rows)
    counted.replace_input_with(1, along_rows)
    (name,) = past_length.measure_by_row(opt)
    assert name.endswith("Slice")
