from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from optimizer.export import onnx_file
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import CompressedState
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.graph_source import open_graph
from optimizer.lower.onnx.qdq import name_codes, read_back
from optimizer.lower.ort import attention, pack, qdq
from tests.lower.decoder_graphs import CONTEXT, Decoder, answers, text
from tests.lower.states import rounded

INT4 = Scheme(4, granularity="group", group_size=32)
QKV = [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]


@pytest.fixture
def llama(decoders: Callable[[str], Decoder]) -> Decoder:
    return decoders("llama")


def lowered(made: Decoder, scheme: Scheme = INT4, without: str = "") -> ir.Model:
    """Fused model with every linear module quantized but the head and `without`."""
    model = made.model
    attention.fuse(model, CONTEXT)
    weights = {}
    for i, (name, module) in enumerate(made.names.modules.items()):
        if name not in ("lm_head", without):
            shape = [int(s) for s in model.graph.initializers[module.initializer].shape or ()]
            value = torch.randn(shape[::-1], generator=torch.Generator().manual_seed(i)) * 0.1
            weights[module.parameter] = rounded(value, scheme)
    qdq.lower(model, made.names, CompressedState(weights=weights))
    return model


@pytest.mark.parametrize(
    "scheme", [INT4, Scheme(8), Scheme(4, symmetric=False, granularity="group", group_size=32)]
)
def test_packing_changes_no_value(llama: Decoder, scheme: Scheme) -> None:
    given, pieces = text(9, (0, 2)), (7, 1, 1)
    apart, together = lowered(llama, scheme), lowered(llama, scheme)
    assert set(pack.pack(together)) >= set(QKV)
    assert np.array_equal(answers(together, given, pieces), answers(apart, given, pieces))


def test_unpacked_is_as_before(llama: Decoder) -> None:
    apart, model = lowered(llama), lowered(llama)
    pack.pack(model)
    assert name_codes(f"{QKV[0]}.weight") not in model.graph.initializers
    pack.unpack(model)
    assert {str(n.name) for n in model.graph} == {str(n.name) for n in apart.graph}
    assert set(model.graph.initializers) == set(apart.graph.initializers)
    for module in QKV:
        parameter = f"{module}.weight"
        assert np.array_equal(read_back(model, parameter), read_back(apart, parameter))


def test_pieces_are_cut_from_a_packed_model_with_weights_in_a_file(
    llama: Decoder, tmp_path: Path
) -> None:
    """A weight that was packed is read from the model's file while the next piece is written."""
    apart, model = lowered(llama), lowered(llama)
    pack.pack(model)
    onnx_file.save(model, tmp_path / "model.onnx", limit=0)
    graph = open_graph(tmp_path / "model.onnx")
    other = QKV[0].replace("q_proj", "o_proj")
    for module in QKV:
        both = [e for e in cut.list_edges(graph, [*QKV, other]) if e.module in (module, other)]
        cut.write_products(graph, both, tmp_path / f"{module}.onnx")
        piece = onnx_file.load(tmp_path / f"{module}.onnx")
        parameter = f"{module}.weight"
        assert np.array_equal(read_back(piece, parameter), read_back(apart, parameter))


def test_a_float_part_is_not_packed(llama: Decoder) -> None:
    held = pack.pack(lowered(llama, without=QKV[1]))
    assert not set(QKV) & set(held)
    assert "model.layers.1.self_attn.q_proj" in held


def test_parts_of_other_groups_are_not_packed(llama: Decoder) -> None:
    model = lowered(llama)
    for node in model.graph:
        if node.name == f"{QKV[2]}/weight":
            node.attributes["block_size"] = ir.AttrInt64("block_size", 64)
    assert not set(QKV) & set(pack.pack(model))
