from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.foundation.state import Activations
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.ort.inspection import inspect
from tests.export.folders import Exported
from tests.lower.running import ORT, TRT, lowered, session
from tests.lower.states import PER_CHANNEL, SCHEMES, state_of
from tests.minilm import BLOCKS


@pytest.mark.parametrize(
    ("scheme", "activations", "operator"),
    [
        ("int8 channel", "tensor", "MatMulIntegerToFloat"),
        ("int8 tensor", "tensor", "MatMulIntegerToFloat"),
        ("int8 channel", "token", "MatMulInteger"),
        ("int8 channel", None, "MatMulNBits"),
        ("int4 group 32", None, "MatMulNBits"),
        ("int4 group 32 asymmetric", None, "MatMulNBits"),
    ],
)
def test_every_module_of_the_real_model_runs_in_an_integer_kernel(
    minilm: Exported, tmp_path: Path, scheme: str, activations: Activations, operator: str
) -> None:
    state = state_of(minilm, SCHEMES[scheme], activations)
    folder = lowered(minilm, state, ORT, tmp_path)
    OrtRunner(folder / "model.onnx", threads=1, optimized=tmp_path / "optimized.onnx").close()
    found = inspect(folder, tmp_path / "optimized.onnx")
    count = 6 * BLOCKS
    assert (found["eligible"], found["fused"], found["wider"]) == (count, count, [])
    assert found["operators"] == {operator: count}


@pytest.mark.parametrize("scheme", ["int4 group 32", "int4 group 32 asymmetric"])
def test_groups_beside_quantized_inputs_are_wider(
    tiny: Exported, tmp_path: Path, scheme: str
) -> None:
    """ONNX Runtime multiplies them in float: why targets/__init__.py asks for
    allow_precision_fallback."""
    folder = lowered(tiny, state_of(tiny, SCHEMES[scheme], "tensor"), ORT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    found = inspect(folder, tmp_path / "optimized.onnx")
    assert found["wider"] == sorted(tiny.names.modules)
    assert found["operators"] == {}


def test_factors_do_not_keep_modules_from_integer_kernels(tiny: Exported, tmp_path: Path) -> None:
    state = state_of(tiny, PER_CHANNEL, "tensor", factored="dense")
    folder = lowered(tiny, state, ORT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    assert inspect(folder, tmp_path / "optimized.onnx")["wider"] == []


def test_without_fusion_every_module_is_named_as_wider(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL), ORT, tmp_path)
    found = inspect(folder, folder / "model.onnx")
    assert found["fused"] == 0
    assert found["wider"] == sorted(tiny.names.modules)


def test_the_other_dialect_leaves_shared_inputs_wider(tiny: Exported, tmp_path: Path) -> None:
    """Why there are two dialects: an int8 input shared by q, k and v does not fuse."""
    state = state_of(tiny, PER_CHANNEL, "tensor", symmetric=True)
    folder = lowered(tiny, state, TRT, tmp_path)
    session(folder / "model.onnx", optimized=tmp_path / "optimized.onnx")
    assert inspect(folder, tmp_path / "optimized.onnx")["wider"]


def test_a_weight_turned_back_into_float_is_wider(tiny: Exported, tmp_path: Path) -> None:
    folder = lowered(tiny, state_of(tiny, PER_CHANNEL), ORT, tmp_path)
    found = inspect(folder, tiny.graph / "model.onnx")
    assert (found["eligible"], found["fused"]) == (12, 0)
