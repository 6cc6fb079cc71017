"""build: real sessions and real engines, and never a silent fall back."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from optimizer.foundation.errors import GateError, MachineError, RecipeError
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, HarnessError
from optimizer.harness.runtimes.openvino import devices
from optimizer.harness.runtimes.trt.build import builder
from optimizer.harness.runtimes.trt.header import read_header
from optimizer.harness.runtimes.trt.validity import refuse_invalid
from optimizer.lower import build as stage
from optimizer.lower.ort import build as onnxruntime
from optimizer.lower.ort import lower as lowering
from optimizer.lower.trt import build as tensorrt
from optimizer.recipe.schema import OnnxRuntimeTarget, OpenVinoTarget, Shapes, TensorRTTarget
from tests.harness import small_model

SHAPES = Shapes(batch=(1, 2, 4), sequence=(4, 16, 32))
ORT = OnnxRuntimeTarget(runtime="onnxruntime", threads=1)


def rtx(**changes: Any) -> TensorRTTarget:
    given = {"runtime": "tensorrt-rtx", "float": "fp32", "shapes": SHAPES, **changes}
    return TensorRTTarget(**given)


def built(target: Any, model: Path, out: Path) -> dict[str, Any]:
    out.mkdir()
    stage.run(target, model, out=out)
    document: dict[str, Any] = json.loads((out / "engine.json").read_text())
    return document


@pytest.fixture(scope="module")
def ort_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.lowered(tmp_path_factory.mktemp("ort"))


@pytest.fixture(scope="module")
def rtx_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    return small_model.lowered(tmp_path_factory.mktemp("rtx"), "trt_qdq", positions=32)


@pytest.fixture(scope="module")
def engine(rtx_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("engine") / "out"
    built(rtx(), rtx_model, out)
    return out


def test_a_module_in_an_integer_kernel_counts_as_fused(ort_model: Path, tmp_path: Path) -> None:
    made = built(ORT, ort_model, tmp_path / "out")
    assert (made["inspected"]["eligible"], made["inspected"]["fused"]) == (1, 1)
    assert made["fallbacks"] == []
    assert made["engine"] is None
    assert not made["deferred"]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["engine.json"]


def test_a_session_leaves_the_same_bytes_twice(ort_model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        built(ORT, ort_model, tmp_path / name)
    texts = {(tmp_path / n / "engine.json").read_bytes() for n in ("a", "b")}
    assert len(texts) == 1


@pytest.fixture
def wider_model(tmp_path: Path) -> Path:
    """Model whose recipe asks for one quantized module more than its file has."""
    folder = small_model.lowered(tmp_path / "model")
    lowering = json.loads((folder / "lowering.json").read_text())
    entry = {"weight": "int8 channel", "activation": "uint8", "codes": "gone.codes"}
    lowering["modules"]["encoder.other"] = entry
    (folder / "lowering.json").write_text(json.dumps(lowering))
    return folder


def test_a_module_that_runs_wider_is_named_and_refused(wider_model: Path, tmp_path: Path) -> None:
    with pytest.raises(GateError, match=r"encoder\.other.*allow_precision_fallback") as caught:
        built(ORT, wider_model, tmp_path / "out")
    assert caught.value.exit_code == 3


def test_allow_precision_fallback_records_what_runs_wider(
    wider_model: Path, tmp_path: Path
) -> None:
    target = ORT.model_copy(update={"allow_precision_fallback": True})
    assert built(target, wider_model, tmp_path / "out")["fallbacks"] == ["encoder.other"]


def test_a_missing_builder_is_the_machines_fault_with_the_pip_line(
    rtx_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_builder(monkeypatch)
    with pytest.raises(MachineError, match=r"pip install .tensorrt-rtx>=1\.7,<2") as caught:
        built(rtx(), rtx_model, tmp_path / "out")
    assert caught.value.exit_code == 5


def test_defer_leaves_it_to_be_built_elsewhere_and_says_why(
    rtx_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_builder(monkeypatch)
    made = built(rtx(on_missing="defer"), rtx_model, tmp_path / "out")
    assert made["deferred"]
    assert made["engine"] is None
    assert "cannot be imported" in made["why"]
    assert made["fit"]["shapes"]["sequence"] == [4, 16, 32]


def test_a_device_that_openvino_does_not_find_ends_with_5_or_is_left_to_a_machine_that_has_it(
    ort_model: Path, tmp_path: Path
) -> None:
    if not devices.explain_absent("npu", devices.list_devices()):
        pytest.skip("this machine has an NPU")
    target = OpenVinoTarget(runtime="openvino", device="npu")
    with pytest.raises(
        MachineError, match=r"OpenVINO finds no NPU here; it finds CPU \("
    ) as caught:
        built(target, ort_model, tmp_path / "out")
    assert caught.value.exit_code == 5
    later = built(target.model_copy(update={"on_missing": "defer"}), ort_model, tmp_path / "later")
    assert (later["deferred"], later["device"], later["fit"]["device"]) == (True, "npu", "npu")


def without_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    row = replace(builder.PRODUCTS["tensorrt-rtx"], module="no_such_tensorrt")
    monkeypatch.setitem(builder.PRODUCTS, "tensorrt-rtx", row)


def test_an_engine_is_built_without_a_gpu_and_described(engine: Path) -> None:
    made = json.loads((engine / "engine.json").read_text())
    header = read_header(engine / "model.engine")
    network = made["network"]
    assert made["fit"]["runtime_version"] == header.version == builder.version()
    assert made["fit"]["compute_capabilities"] == ["80", "86", "89", "120", "121"]
    assert [i["name"] for i in network["io"]["inputs"]] == ["input_ids", "attention_mask"]
    assert network["io"]["outputs"][0]["dtype"] == "FLOAT"
    profile = network["profiles"][0]["input_ids"]
    assert (profile["min"], profile["opt"], profile["max"]) == ([1, 4], [2, 16], [4, 32])
    assert any(kind == "QUANTIZE" for _, kind, _ in network["layers"])


def test_what_an_unopened_engine_cannot_tell_is_said(engine: Path) -> None:
    inspected = json.loads((engine / "engine.json").read_text())["inspected"]
    assert (inspected["eligible"], inspected["fused"], inspected["wider"]) == (1, 1, [])
    assert any("kernels" in line for line in inspected["unknown"])
    assert any("too small" in line for line in inspected["unknown"])


def test_the_network_says_in_what_type_a_module_enters_the_builder(engine: Path) -> None:
    modules = json.loads((engine / "engine.json").read_text())["network"]["modules"]
    assert modules[small_model.MODULE]["weight"] == "INT8"
    assert modules[small_model.MODULE]["activation"] == "INT8"


def test_a_float_activation_where_int8_was_asked_counts_as_wider() -> None:
    asked = {"a": {"activation": "int8"}, "b": {"activation": "float"}, "c": {"activation": "int8"}}
    found = {"a": {"activation": None}, "b": {"activation": None}}
    network = {"modules": found, "kept_packed": True, "bytes": 1}
    assert tensorrt.inspect_network(asked, network)["wider"] == ["a", "c"]
    bloated = {**network, "kept_packed": False}
    assert tensorrt.inspect_network(asked, bloated)["wider"] == ["a", "b", "c"]


def test_only_the_asked_gpus_are_in_the_header(rtx_model: Path, tmp_path: Path) -> None:
    made = built(rtx(compute_capabilities=("86", "120")), rtx_model, tmp_path / "out")
    assert made["fit"]["compute_capabilities"] == ["86", "120"]


def test_progress_reaches_the_end(rtx_model: Path, tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    builder.build(
        rtx_model / "model.onnx",
        tmp_path / "e",
        shapes=SHAPES.model_dump(),
        progress=lambda *step: told.append(step),
    )
    outer = [(done, of) for phase, done, of in told if phase == "Building engine"]
    assert outer[0][0] == 0
    assert outer[-1][0] == outer[-1][1] > 0


def test_an_interrupt_stops_the_build_and_leaves_no_engine(rtx_model: Path, tmp_path: Path) -> None:
    import signal

    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        builder.build(
            rtx_model / "model.onnx",
            tmp_path / "e",
            shapes=SHAPES.model_dump(),
            progress=interrupt,
        )
    assert not (tmp_path / "e").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def refused(model: Path, tmp_path: Path, **changes: Any) -> str:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    with pytest.raises(RecipeError) as caught:
        built(rtx(**changes), model, tmp_path / "out")
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out" / "engine.json").exists()
    return str(caught.value)


def test_a_zero_point_is_refused_naming_the_node(tmp_path: Path) -> None:
    message = refused(small_model.lowered(tmp_path / "m", "ort_qdq"), tmp_path)
    assert "node q (QuantizeLinear)" in message
    assert "symmetric" in message


UNSUPPORTED = {
    "MatMulInteger": ([np.ones((32, 32), np.int8)], ["codes", "codes"], "", "use target onnx"),
    "NoSuchOp": ([], ["input_ids"], "com.example", "The operator is not supported"),
}


@pytest.mark.parametrize("operator", UNSUPPORTED)
def test_an_unsupported_operator_is_refused_naming_the_node(operator: str, tmp_path: Path) -> None:
    arrays, inputs, domain, advice = UNSUPPORTED[operator]
    folder = small_model.lowered(tmp_path / "m", "trt_qdq")
    node = helper.make_node(
        operator, inputs, ["last_hidden_state"], name="encoder.odd", domain=domain
    )
    small_model.save(folder / "model.onnx", [node], dict(zip(["codes"], arrays, strict=False)))
    message = refused(folder, tmp_path)
    assert f"node encoder.odd ({operator})" in message
    assert advice in message


def test_a_profile_longer_than_the_models_positions_is_refused(
    rtx_model: Path, tmp_path: Path
) -> None:
    longer = Shapes(batch=(1, 2, 4), sequence=(4, 16, 64))
    assert "shapes.sequence" in refused(rtx_model, tmp_path, shapes=longer)


def test_a_gpu_that_has_no_fp32_product_is_refused(rtx_model: Path, tmp_path: Path) -> None:
    assert "fp16" in refused(rtx_model, tmp_path, compute_capabilities=("75",))


@pytest.mark.parametrize("damage", ["cut", "magic", "empty"])
def test_a_damaged_engine_is_known_by_its_header(damage: str, engine: Path, tmp_path: Path) -> None:
    data = (engine / "model.engine").read_bytes()
    wrong = {"cut": data[:-1], "magic": b"VTRT" + data[4:], "empty": b""}[damage]
    (tmp_path / "e").write_bytes(wrong)
    with pytest.raises(BundleError, match="engine"):
        read_header(tmp_path / "e")


def test_asking_about_an_engine_writes_nothing_on_stdout(
    engine: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import tensorrt_rtx

    with suppress(HarnessError):  # where there is no GPU
        refuse_invalid(engine / "model.engine", tensorrt_rtx)
    assert capfd.readouterr().out == ""


MEASURED = {  # engines of 1.7.1 for the default GPUs
    "MiniLM fp16 + INT8": ((40_456_916, 34_559_694, 45_176_526, 675), True),
    "MiniLM fp16 with widened integers": ((49_912_217, 34_559_694, 45_176_526, 675), False),
    "one INT4 product of width 2048": ((2_241_732, 2_228_224, 8_519_680, 4), True),
    "that product in fp16": ((8_405_000, 2_228_224, 8_519_680, 4), False),
    "two-layer BERT of width 64, nearly all kernels": ((2_683_660, 128_837, 325_445, 330), None),
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_size_of_an_engine_tells_whether_codes_stayed_codes(name: str) -> None:
    sizes, kept = MEASURED[name]
    assert builder.keeps_packed(*sizes) is kept


def test_an_engine_for_a_product_that_is_not_here_is_left_to_its_machine(
    rtx_model: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    asked = {"hardware_compatible": "ampere_plus", "on_missing": "defer"}
    made = built(rtx(runtime="tensorrt", **asked), rtx_model, tmp_path / "out")
    if not made["deferred"]:
        pytest.skip("tensorrt and a GPU are here")
    assert made["fit"]["hardware_compatible"] == "ampere_plus"
    assert "compute_capabilities" not in made["fit"]  # it has no such option
    assert "tensorrt" in made["why"]


def test_each_bucket_is_a_profile_of_the_engine_and_of_its_fit(
    rtx_model: Path, tmp_path: Path
) -> None:
    buckets = [{"sequence": [4, 8, 8]}, {"sequence": [9, 16, 32], "batch": [1, 1, 1]}]
    shapes = Shapes.model_validate_json(
        json.dumps({"batch": [1, 2, 4], "sequence": [4, 16, 32], "buckets": buckets})
    )
    made = built(rtx(shapes=shapes), rtx_model, tmp_path / "out")
    taken = [p["input_ids"]["max"] for p in made["network"]["profiles"]]
    assert taken == [[4, 8], [1, 32]]
    assert [p["sequence"] for p in made["fit"]["shapes"]] == [[4, 8, 8], [9, 16, 32]]


def test_kernels_read_from_an_opened_engine_decide_what_runs_wider() -> None:
    asked = {"a": {"weight": "int8 channel", "activation": "int8"}}
    kernel = {"layer": "l", "tactic": "t", "weight": "INT8", "fused": []}
    network = {"modules": {"a": {"activation": "INT8"}}, "kept_packed": True, "bytes": 1}
    for multiplies, wider in (("INT8", []), ("HALF", ["a"]), (None, [])):
        kernels = {"a": {**kernel, "multiplies": multiplies}}
        inspected = tensorrt.inspect_network(asked, {**network, "kernels": kernels})
        assert inspected["wider"] == wider
        assert any("the engine does not report" in line for line in inspected["unknown"]) == (
            multiplies is None
        )


def test_computing_nodes_that_stay_on_the_cpu_count_as_wider() -> None:
    found = {"eligible": 1, "fused": 1, "wider": ["a"]}
    told = onnxruntime.add_cpu_nodes(found, ["l.0/attn (GroupQueryAttention)"])
    assert told["wider"] == ["a", "l.0/attn (GroupQueryAttention) on the CPU"]


def test_what_depends_on_the_gpu_is_looked_for_again_when_the_gpu_changes() -> None:
    trt_target = TensorRTTarget(runtime="tensorrt")
    for target, looks in (
        (trt_target, True),
        (rtx(), False),  # built for named GPUs, on any machine
        (rtx(strip_weights=True), True),  # deferred without one
        (ORT, False),
        (ORT.model_copy(update={"device": "cuda"}), True),
    ):
        assert ("gpu" in stage.files(target)) == looks
    for runtime, row in builder.PRODUCTS.items():
        reads = stage.files(TensorRTTarget(runtime=runtime))  # type: ignore[arg-type]
        assert {f"version of {name}" for name in row.distributions} <= set(reads)


def test_no_product_of_fp32_is_rounded_to_tf32() -> None:
    real: Any = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    config = real.Builder(real.Logger()).create_builder_config()
    assert config.get_flag(real.BuilderFlag.TF32)  # the default
    builder.configure(real, config, builder.BuildOptions())
    assert not config.get_flag(real.BuilderFlag.TF32)


def test_attention_is_not_fused_where_the_fused_one_would_run_on_the_cpu() -> None:
    contract = Contract.from_json(small_model.contract("text-generation"))
    target = ORT.model_copy(update={"device": "cuda", "float": "fp32"})
    made = lowering._decoder(None, target, contract)  # type: ignore[arg-type]
    assert made is not None
    assert made["fused"] == []
    assert "runs fp32 on the CPU, not on CUDA" in made["left"]["all"]
