"""A quantized token embedding: rows that ONNX Runtime looks up equal the state's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from optimizer.export import names, onnx_file
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.state import CompressedState
from optimizer.lower.onnx import lookup
from optimizer.lower.onnx.qdq import name_codes, read_back, scale_name
from optimizer.lower.ort import qdq
from optimizer.lower.ort.inspection import inspect
from tests.conftest import heavy_tailed
from tests.export.graphs import graph
from tests.lower.decoder_graphs import Decoder, answers, text
from tests.lower.running import session
from tests.lower.states import SCHEMES, rounded

TABLE, HEAD = "model.embed_tokens", "lm_head"
GROUPS = Scheme(8, granularity="group", group_size=32)
EACH = {n: s for n, s in SCHEMES.items() if s.bits == 8} | {
    "int8 group 16 asymmetric": Scheme(8, symmetric=False, granularity="group", group_size=16),
    "int8 tensor asymmetric": Scheme(8, symmetric=False, granularity="tensor"),
}
ROWS, WIDTH = 40, 64
VALUES = heavy_tailed((ROWS, WIDTH), 3, 0.1)
IDS = np.random.default_rng(0).integers(0, ROWS, (2, 5))


def alone(q: QTensor) -> ir.Model:
    """A graph that only looks up, lowered."""
    model = graph("g (int64[b, n] i) => (float[b, n, 64] e) { e = Gather(w, i) }", w=VALUES.numpy())
    model.graph.initializers["w"].name = f"{TABLE}.weight"
    for node in model.graph:
        node.name = f"{TABLE}/Gather"
    found = names.pair(model, {f"{TABLE}.weight": VALUES}, (), tables=[TABLE])
    assert qdq.lower(model, found, CompressedState({f"{TABLE}.weight": q})) == {TABLE: "ids"}
    return model


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("scheme", EACH.values(), ids=list(EACH))
def test_the_rows_are_the_states_bit_for_bit(scheme: Scheme, optimize: bool) -> None:
    q = rounded(VALUES, scheme)
    run = session(ir.to_proto(alone(q)).SerializeToString(), optimize)
    assert np.array_equal(run.run(None, {"i": IDS})[0], q.dequantize().numpy()[IDS])


@pytest.mark.parametrize("scheme", EACH.values(), ids=list(EACH))
def test_the_table_reads_back_as_the_state_has_it(scheme: Scheme) -> None:
    q = rounded(VALUES, scheme)
    assert np.array_equal(read_back(alone(q), f"{TABLE}.weight"), q.dequantize().numpy())


@pytest.mark.parametrize("scheme", EACH.values(), ids=list(EACH))
def test_the_runtime_keeps_the_table_in_codes(scheme: Scheme, tmp_path: Path) -> None:
    assert inspected(alone(rounded(VALUES, scheme)), tmp_path)["wider"] == []


def test_a_table_that_is_widened_whole_is_named(tmp_path: Path) -> None:
    model = alone(rounded(VALUES, Scheme(8)))
    taken = next(n for n in model.graph if n.inputs[0].name == name_codes(f"{TABLE}.weight"))
    cast = ir.node("Cast", [taken.inputs[0]], {"to": int(ir.DataType.FLOAT)})
    taken.replace_input_with(0, cast.outputs[0])
    model.graph.insert_before(taken, cast)
    assert inspected(model, tmp_path)["wider"] == [TABLE]


def inspected(model: ir.Model, folder: Path) -> dict[str, list[str]]:
    entry = {"activation": lookup.IDS, "codes": name_codes(f"{TABLE}.weight")}
    (folder / "lowering.json").write_text(json.dumps({"modules": {TABLE: entry}}))
    session(ir.to_proto(model).SerializeToString(), optimized=folder / "optimized.onnx")
    return inspect(folder, folder / "optimized.onnx")


@pytest.fixture
def llama(decoders: Callable[[str], Decoder]) -> Decoder:
    """Its head is tied to its embedding."""
    return decoders("llama")


def table_of(made: Decoder) -> torch.Tensor:
    value = made.model.graph.initializers[f"{TABLE}.weight"].const_value
    assert value is not None
    return torch.from_numpy(np.array(value.numpy()))


def coded(made: Decoder, *modules: str) -> CompressedState:
    q = rounded(table_of(made), GROUPS)
    return CompressedState({f"{m}.weight": q for m in modules})


def test_a_decoder_answers_as_with_the_states_values_in_a_float_table(llama: Decoder) -> None:
    state = coded(llama, TABLE, HEAD)
    ours, floats = llama.model, llama.model
    qdq.lower(ours, llama.names, state)
    held = floats.graph.initializers[f"{TABLE}.weight"]
    held.const_value = ir.tensor(state.weights[f"{TABLE}.weight"].dequantize().numpy())
    qdq.lower(floats, llama.names, coded(llama, HEAD))
    given = text(9, (0, 2))
    assert np.array_equal(answers(ours, given, (7, 1, 1)), answers(floats, given, (7, 1, 1)))


def test_no_float_table_is_left_and_the_file_is_smaller(llama: Decoder, tmp_path: Path) -> None:
    ours, floats = llama.model, llama.model
    qdq.lower(ours, llama.names, coded(llama, TABLE, HEAD))
    qdq.lower(floats, llama.names, coded(llama, HEAD))
    assert f"{TABLE}.weight" not in ours.graph.initializers
    shapes = {n: tuple(v.shape or ()) for n, v in ours.graph.initializers.items()}
    rows = {n for n, s in shapes.items() if s[:1] == tuple(table_of(llama).shape[:1])}
    assert rows == {name_codes(f"{TABLE}.weight"), scale_name(f"{TABLE}.weight")}
    for name, model in (("ours", ours), ("floats", floats)):
        onnx_file.save(model, tmp_path / name)
    saved = (tmp_path / "floats").stat().st_size - (tmp_path / "ours").stat().st_size
    assert saved > 0.65 * 4 * table_of(llama).numel()  # 32 bits become 8, and one scale in 32


def test_a_tied_head_that_stays_float_is_refused(llama: Decoder) -> None:
    with pytest.raises(OptimizeError, match=r"lm_head, which shares its values, stays float"):
        qdq.lower(llama.model, llama.names, coded(llama, TABLE))
