"""TensorRT-RTX parses and builds what trt_qdq writes; no GPU is needed to build."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.state import Activations
from tests.export.folders import Exported
from tests.lower.running import ORT, TRT, TRT16, lowered
from tests.lower.states import SCHEMES, state_of

trt: Any = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")


def parsed(model: Path) -> tuple[Any, Any, list[str]]:
    """(builder, network, the parser's complaints)."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    parser.parse_from_file(str(model))
    return builder, network, [parser.get_error(i).desc() for i in range(parser.num_errors)]


def built(model: Path) -> bytes | None:
    builder, network, errors = parsed(model)
    assert not errors
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        profile.set_shape(network.get_input(i).name, (1, 8), (4, 32), (8, 64))
    config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    return None if engine is None else bytes(engine)


CASES: list[tuple[str, Activations, dict[str, Any]]] = [
    ("int8 channel", "tensor", {}),
    ("int8 channel", "tensor", {"symmetric": True, "factored": "dense"}),
    ("int8 channel", None, {}),
    ("int4 group 32", None, {}),
]


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("scheme", "activations", "options"), CASES)
def test_an_engine_is_built(
    tiny: Exported,
    tiny16: Exported,
    tmp_path: Path,
    scheme: str,
    activations: Activations,
    options: dict[str, Any],
    half: bool,
) -> None:
    made, target = (tiny16, TRT16) if half else (tiny, TRT)
    state = state_of(made, SCHEMES[scheme], activations, **options)
    engine = built(lowered(made, state, target, tmp_path) / "model.onnx")
    assert engine is not None
    assert engine[:4] == b"vtrt"


def test_no_engine_is_built_of_groups_beside_quantized_inputs(
    tiny: Exported, tmp_path: Path
) -> None:
    """Why targets/__init__.py takes them for ONNX Runtime alone."""
    state = state_of(tiny, SCHEMES["int4 group 32"], "tensor")
    assert built(lowered(tiny, state, TRT, tmp_path) / "model.onnx") is None


def test_the_other_dialect_is_refused_by_the_parser(tiny: Exported, tmp_path: Path) -> None:
    """Why there are two dialects: uint8 and zero points are not accepted here."""
    folder = lowered(tiny, state_of(tiny, SCHEMES["int8 channel"], "tensor"), ORT, tmp_path)
    assert parsed(folder / "model.onnx")[2]
