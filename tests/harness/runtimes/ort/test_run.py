"""The ONNX Runtime runner: what it takes, what it refuses, and never another device."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.gpu.resident import OrtResident
from optimizer.harness.errors import BundleError, InputError, MachineError
from optimizer.harness.runtimes.ort import providers
from optimizer.harness.runtimes.ort.run import OrtRunner
from tests.harness import small_model


def arrays(batch: int = 2, sequence: int = 5) -> dict[str, Any]:
    ids = np.arange(batch * sequence, dtype=np.int64).reshape(batch, sequence)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model.model(tmp_path_factory.mktemp("ort") / "model.onnx")


def test_it_computes_what_the_reference_evaluator_of_onnx_computes(model: Path) -> None:
    from onnx.reference import ReferenceEvaluator

    wanted = ReferenceEvaluator(onnx.load(model)).run(None, arrays())[0]
    with OrtRunner(model, threads=1) as runner:
        got = runner.infer(arrays())["last_hidden_state"]
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def wrong_requests() -> list[tuple[dict[str, Any], str]]:
    good = arrays()
    return [
        ({"input_ids": good["input_ids"]}, "missing input attention_mask"),
        ({**good, "position_ids": good["input_ids"]}, "unknown input position_ids"),
        ({**good, "input_ids": good["input_ids"].astype(np.int32)}, "input input_ids: int32"),
        ({**good, "input_ids": good["input_ids"][0]}, "input input_ids: shape"),
        (arrays(0), "input input_ids: shape .* empty"),
        (
            {**good, "attention_mask": good["attention_mask"][:, :3]},
            "input attention_mask: axis sequence is 3 here and 5 on input input_ids",
        ),
    ]


@pytest.mark.parametrize(("given", "message"), wrong_requests())
def test_a_wrong_array_is_named(given: dict[str, Any], message: str, model: Path) -> None:
    with OrtRunner(model, threads=1) as runner, pytest.raises(InputError, match=message):
        runner.infer(given)


def test_a_gpu_that_is_not_there_is_an_error_and_never_the_cpu(model: Path) -> None:
    import onnxruntime

    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    with pytest.raises(MachineError, match="pip install onnxruntime-gpu") as caught:
        OrtRunner(model, device="cuda")
    assert caught.value.exit_code == 5


def test_a_provider_that_does_not_start_is_an_error_and_never_the_cpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    offered = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: offered)
    real = onnxruntime.InferenceSession

    def without_cuda(path: str, options: Any, providers: list[str], **more: Any) -> Any:
        return real(path, options, providers=["CPUExecutionProvider"], **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", without_cuda)
    with pytest.raises(MachineError, match="did not start") as caught:
        OrtRunner(model, device="cuda")
    assert caught.value.exit_code == 5
    assert "nvidia-smi" in caught.value.fix  # the driver may be too old


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("CUDA failure 2: out of memory", "too little free memory"),
        ("BFCArena: Failed to allocate memory for requested buffer", "too little free memory"),
        ("no kernel image is available for execution on the device", "no kernels for the GPU"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver may be too old"),
        ("libcudnn.so.9: cannot open shared object file", "pip install"),
    ],
)
def test_a_model_that_does_not_open_on_a_gpu_is_refused_with_what_to_do(
    message: str, words: str
) -> None:
    assert words in providers.advise("cuda", message)


def test_an_unknown_device_is_refused(model: Path) -> None:
    with pytest.raises(InputError, match="cpu, cuda"):
        OrtRunner(model, device="tpu")


def test_a_file_that_is_missing_or_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"not a model")
    for name in ("missing.onnx", "broken.onnx"):
        with pytest.raises(BundleError, match=name):
            OrtRunner(tmp_path / name)


def test_the_saved_graph_is_the_fused_one_and_computes_the_same(tmp_path: Path) -> None:
    small_model.model(tmp_path / "model.onnx", dialect="ort_qdq")
    optimized = tmp_path / "optimized.onnx"
    with OrtRunner(tmp_path / "model.onnx", threads=1, optimized=optimized) as runner:
        wanted = runner.infer(arrays())["last_hidden_state"]
    kinds = {n.op_type for n in onnx.load(optimized).graph.node}
    assert kinds & {"MatMulIntegerToFloat", "QLinearMatMul"}
    with OrtRunner(optimized, threads=1) as runner:
        np.testing.assert_array_equal(runner.infer(arrays())["last_hidden_state"], wanted)


def test_buffers_that_stay_give_the_same_bits_whatever_shapes_came_before(model: Path) -> None:
    with OrtRunner(model, threads=1) as plain, OrtRunner(model, threads=1, bound=True) as bound:
        for shape in [(2, 5), (1, 7), (2, 5), (3, 2), (1, 7), *((1, n) for n in range(1, 20))]:
            given = arrays(*shape)
            given["input_ids"] = given["input_ids"][::-1]  # not contiguous
            wanted = plain.infer(given)["last_hidden_state"]
            first = bound.infer(given)["last_hidden_state"]
            np.testing.assert_array_equal(first, wanted)
            changed = {**given, "input_ids": given["input_ids"] + 1}
            bound.infer(changed)
            np.testing.assert_array_equal(first, wanted)  # a copy: not the buffer


def test_what_is_resident_is_run_again_without_being_given_again(model: Path) -> None:
    with OrtRunner(model, threads=1, bound=True) as runner:
        held = OrtResident(runner, arrays())
        held.run()
        wanted = runner.infer(arrays())["last_hidden_state"]
        np.testing.assert_array_equal(held.outputs()["last_hidden_state"], wanted)


def test_cuda_graphs_are_no_option_of_a_cpu(model: Path) -> None:
    with pytest.raises(InputError, match="CUDA graphs are not supported"):
        OrtRunner(model, graphs=True)


@pytest.mark.parametrize("device", ["tensorrt", "tensorrt-rtx"])
def test_cuda_graphs_are_not_asked_of_a_provider_that_keeps_only_one(
    device: str, model: Path
) -> None:
    with pytest.raises(InputError, match=r"CUDA graphs are not supported.*Accepted: cuda"):
        OrtRunner(model, device=device, graphs=True)


@pytest.mark.parametrize(
    ("device", "fix"),
    [
        ("tensorrt", "pip install onnxruntime-gpu"),
        ("tensorrt-rtx", "pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx"),
    ],
)
def test_a_provider_that_is_not_installed_has_a_line_to_install_it(
    device: str, fix: str, model: Path
) -> None:
    import onnxruntime

    if providers.PROVIDERS[device].name in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime has the provider")
    with pytest.raises(MachineError, match=fix):
        OrtRunner(model, device=device)


def test_a_session_that_quietly_runs_elsewhere_is_an_error() -> None:
    cpu, cuda = providers.PROVIDERS["cpu"].name, providers.PROVIDERS["cuda"].name
    refuse = providers.refuse_fallback
    refuse("cuda", [cuda, cpu], {cuda: 40, cpu: 2})
    refuse("tensorrt", ["TensorrtExecutionProvider", cuda, cpu], {cuda: 3})
    with pytest.raises(MachineError, match="did not start"):
        refuse("cuda", [cpu], {})
    with pytest.raises(MachineError, match="supports no node"):
        refuse("cuda", [cuda, cpu], {cpu: 42})


def test_the_placement_counts_every_node(model: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(*providers.RECORD_PLACEMENT)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    nodes = len(onnx.load(model).graph.node)
    assert providers.count_placement(session) == {"CPUExecutionProvider": nodes}
    kinds = [n.op_type for n in onnx.load(model).graph.node]
    stayed = providers.list_nodes_on_cpu(session)
    assert len(stayed) == sum(kind in providers.COMPUTES for kind in kinds) > 0
    assert any("(MatMul)" in node for node in stayed)
