from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from optimizer.lower.ort import rank
from tests.lower.decoder_graphs import Decoder, answers, text
from tests.lower.ort.test_attention import Decoders
from tests.lower.running import session


def lifted(made: Decoder) -> tuple[ir.Model, list[str]]:
    model = made.model
    parameters = {m.parameter for m in made.names.modules.values()}
    return model, rank.lift(model, made.names, parameters)


def kernels(model: ir.Model, path: Path) -> set[str]:
    session(ir.to_proto(model).SerializeToString(), optimized=path)
    return {n.op_type for n in onnx.load(path).graph.node}


def test_flattened_products_become_no_float_gemm(decoders: Decoders, tmp_path: Path) -> None:
    made = decoders("flattened")
    assert "FusedGemm" in kernels(made.model, tmp_path / "before.onnx")
    model, modules = lifted(made)
    assert {name.rsplit(".", 1)[1] for name in modules} == {"fc1", "fc2"}
    assert not {"FusedGemm", "Gemm"} & kernels(model, tmp_path / "after.onnx")


def test_the_answers_are_the_same(decoders: Decoders) -> None:
    made, given = decoders("flattened"), text(12, (0, 4))
    found, wanted = (answers(m, given, (9, 1, 1, 1)) for m in (lifted(made)[0], made.model))
    assert np.allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_graph_without_flattened_products_keeps_its_bytes(decoders: Decoders) -> None:
    made = decoders("llama")
    model, modules = lifted(made)
    assert modules == []
    assert ir.to_proto(model).SerializeToString() == ir.to_proto(made.model).SerializeToString()
