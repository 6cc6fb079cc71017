"""The runner of engines, on a stand-in for the GPU: buffers, profiles, graphs and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu.resident import TrtResident
from optimizer.harness.errors import BundleError, InputError, MachineError, UnopenedError
from optimizer.harness.runtimes.trt.cuda import Cuda
from optimizer.harness.runtimes.trt.graphs import Graphs
from optimizer.harness.runtimes.trt.inspect import inspect_engine
from optimizer.harness.runtimes.trt.run import TrtRunner
from tests.harness import standin_gpu as standin

SHORT: Mapping[str, standin.Range] = {"x": ((1, 1), (1, 8), (4, 16))}
LONG: Mapping[str, standin.Range] = {"x": ((1, 17), (4, 32), (8, 64))}


def doubling(**changes: Any) -> standin.Model:
    """y = 2 x + 1, int64 to float32."""
    fields: dict[str, Any] = {
        "inputs": {"x": "INT64"},
        "outputs": {"y": "FLOAT"},
        "profiles": [SHORT, LONG],
        "shapes": lambda given: {"y": given["x"]},
        "run": lambda arrays: {"y": arrays["x"].astype(np.float32) * 2 + 1},
    }
    return standin.Model(**(fields | changes))


def x(batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, 99, (batch, length))}


Open = Callable[..., tuple[TrtRunner, standin.Runtime, standin.Engine]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def make(model: standin.Model | None = None, **options: Any) -> Any:
        gpu = standin.Runtime()
        gpu.uncapturable = options.pop("uncapturable", False)
        trt = standin.product(model or doubling(), gpu)
        given = {"product": "tensorrt", "trt": trt, "driver": Cuda(gpu)} | options
        return TrtRunner(standin.engine_file(tmp_path), **given), gpu, trt.engine

    return make


def right(runner: TrtRunner, arrays: dict[str, Any]) -> bool:
    return np.array_equal(runner.infer(arrays)["y"], arrays["x"] * 2.0 + 1)


def test_answers_are_the_engines_at_every_shape_in_any_order(opened: Open) -> None:
    runner, _, _ = opened()
    shapes = [(1, 8), (4, 16), (2, 3), (1, 8), (8, 64), (1, 8), (4, 16), (8, 64), (1, 1)]
    assert all(right(runner, x(b, n, seed)) for seed, (b, n) in enumerate(shapes))


def test_an_answer_does_not_change_when_the_next_is_made(opened: Open) -> None:
    runner, _, _ = opened()
    first = runner.infer(x(2, 4, 1))["y"]
    before = first.copy()
    runner.infer(x(2, 4, 2))
    assert np.array_equal(first, before)


def test_a_shape_that_comes_again_is_captured_and_replayed(opened: Open) -> None:
    runner, gpu, _ = opened()
    for seed in range(4):
        gpu.calls.clear()
        assert right(runner, x(2, 4, seed))
    assert gpu.calls == ["graph", "wait"]


def test_a_captured_context_is_used_for_nothing_else(opened: Open) -> None:
    runner, _, engine = opened()
    for length in (4, 4, 5, 5):
        assert right(runner, x(2, length))
    assert len(engine.contexts) == 3  # the profile's own, and one for each graph


def test_graphs_go_when_a_buffer_they_use_is_replaced(opened: Open) -> None:
    runner, gpu, _ = opened()
    for length in (4, 4, 16, 4, 4):  # 16 needs more room than was there
        assert right(runner, x(2, length, length))
    assert "graph freed" in gpu.calls


def test_buffers_are_used_again(opened: Open) -> None:
    runner, gpu, _ = opened(graphs=False)
    runner.infer(x(4, 16))
    before = set(gpu.live)
    for length in (1, 8, 16):
        runner.infer(x(4, length))
    assert set(gpu.live) == before


def test_without_graphs_every_forward_is_enqueued(opened: Open) -> None:
    runner, gpu, _ = opened(graphs=False)
    for _ in range(3):
        assert right(runner, x(1, 4))
    assert "graph" not in gpu.calls


def test_a_product_that_captures_by_itself_is_told_to_and_left_to(
    opened: Open, tmp_path: Path
) -> None:
    cache = tmp_path / "cache" / "kernels"
    runner, gpu, _ = opened(product="tensorrt-rtx", runtime_cache=cache)
    for _ in range(3):
        assert right(runner, x(1, 4))
    assert "graph" not in gpu.calls
    runner.close()
    assert cache.read_bytes() == b"+"


def test_what_cannot_be_captured_runs_and_says_why(opened: Open) -> None:
    runner, gpu, _ = opened(uncapturable=True)
    for seed in range(3):
        gpu.calls.clear()
        assert right(runner, x(1, 4, seed))
    assert gpu.calls.count("forward") == 1  # it is not tried again
    assert "graph" not in gpu.calls
    (why,) = runner.not_captured.values()
    assert "the forward failed" in why


def test_a_shape_outside_every_profile_is_refused_with_the_range(opened: Open) -> None:
    runner, _, _ = opened()
    with pytest.raises(InputError, match=r"input x: axis 1 is 65 .*17 to 64"):
        runner.infer(x(8, 65))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "missing input x"),
        (x(1, 2) | {"z": np.zeros(1)}, "unknown input z"),
        ({"x": np.zeros((1, 2), np.float32)}, "float32 was given. Accepted: int64"),
    ],
)
def test_wrong_arrays_are_refused_by_name(
    arrays: dict[str, Any], message: str, opened: Open
) -> None:
    runner, _, _ = opened()
    with pytest.raises(InputError, match=message):
        runner.infer(arrays)


def test_outputs_whose_shape_the_data_decide_come_whole(opened: Open) -> None:
    model = doubling(
        shapes=lambda given: {"y": (-1,)},
        run=lambda arrays: {"y": arrays["x"][arrays["x"] > 50].astype(np.float32)},
    )
    runner, _, _ = opened(model)
    for seed in range(3):
        given = x(2, 9, seed)["x"]
        assert np.array_equal(runner.infer({"x": given})["y"], given[given > 50])


@pytest.mark.parametrize("graphs", [True, False])
def test_a_resident_forward_copies_nothing(graphs: bool, opened: Open) -> None:
    runner, gpu, _ = opened(graphs=graphs)
    given = x(2, 4)
    resident = TrtResident(runner, given)
    gpu.calls.clear()
    resident.run()
    assert not any(call.startswith("copy") for call in gpu.calls)
    assert ("graph" in gpu.calls) == graphs
    runner.infer(x(4, 16, 3))  # has buffers of its own
    assert np.array_equal(resident.outputs()["y"], given["x"] * 2.0 + 1)


def test_closing_gives_all_memory_back(opened: Open) -> None:
    runner, gpu, _ = opened()
    for length in (4, 4, 32):
        runner.infer(x(1, length))
    resident = TrtResident(runner, x(1, 3))
    resident.close()
    runner.close()
    assert gpu.live == {}


def test_a_file_that_does_not_open_is_the_machines_fault_and_a_missing_one_the_bundles(
    tmp_path: Path,
) -> None:
    gpu = standin.Runtime()
    (tmp_path / "bad").write_bytes(b"no engine")
    for name, kind, message in (
        ("bad", UnopenedError, "does not open on this machine"),
        ("none", BundleError, "is missing"),
    ):
        with pytest.raises(kind, match=message):
            TrtRunner(
                tmp_path / name,
                product="tensorrt",
                trt=standin.product(doubling(), gpu),
                driver=Cuda(gpu),
            )


def test_a_machine_without_a_gpu_is_told_so() -> None:
    with pytest.raises(MachineError, match="no GPU was found"):
        Cuda(standin.Runtime(devices=0))


def test_a_call_that_fails_is_named_with_the_drivers_words() -> None:
    with pytest.raises(MachineError, match="cudaFree failed: invalid argument"):
        Cuda(standin.Runtime()).free(12345)


def test_the_least_recently_used_graph_is_released() -> None:
    released: list[int] = []
    graphs: Graphs[int] = Graphs(released.append, limit=2)
    for key in (1, 2):
        graphs.put(key, key)
    graphs.get(1)
    graphs.put(3, 3)
    assert released == [2]
    assert (graphs.get(1), graphs.get(2)) == (1, None)
    graphs.clear()
    assert sorted(released) == [1, 2, 3]


def test_a_key_is_due_the_second_time() -> None:
    graphs: Graphs[int] = Graphs(lambda _: None)
    assert [graphs.due("a"), graphs.due("b"), graphs.due("a")] == [False, False, True]


@pytest.mark.parametrize("allowed", [True, False])
def test_code_in_an_engine_runs_only_when_it_was_allowed(allowed: bool, opened: Open) -> None:
    runner, _, _ = opened(host_code=allowed)
    opener = runner.session._runtime
    assert getattr(opener, "engine_host_code_allowed", False) == allowed


def test_an_engine_that_the_runtime_calls_invalid_is_never_deserialized(tmp_path: Path) -> None:
    gpu = standin.Runtime()
    trt = standin.product(doubling(), gpu)
    standin.objecting(trt, 2)
    with pytest.raises(UnopenedError, match="compute capability"):
        TrtRunner(standin.engine_file(tmp_path), product="tensorrt-rtx", trt=trt, driver=Cuda(gpu))
    log = SimpleNamespace(messages=[])
    assert inspect_engine(trt, log, b"an engine", {}) is None
    assert trt.deserialized == 0


@pytest.mark.parametrize(("name", "capability"), [("b card", (8, 9)), ("a card", (9, 0))])
def test_another_gpu_than_the_engine_was_chosen_for_is_refused_first(
    name: str, capability: tuple[int, int], tmp_path: Path
) -> None:
    gpu = standin.Runtime()
    trt = standin.product(doubling(), gpu)
    file, chosen = standin.engine_file(tmp_path), ("a card", "8.9")
    TrtRunner(file, product="tensorrt", trt=trt, driver=Cuda(gpu), gpu=chosen)
    gpu.name = "a card MIG 1g.10gb"  # a part of it
    TrtRunner(file, product="tensorrt", trt=trt, driver=Cuda(gpu), gpu=chosen)
    gpu.name, gpu.capability = name, capability
    with pytest.raises(MachineError, match="CUDA's first device is"):
        TrtRunner(file, product="tensorrt", trt=trt, driver=Cuda(gpu), gpu=chosen)
    assert trt.deserialized == 2


@pytest.mark.parametrize(("asked", "set_to"), [("lazy", 0), ("eager", 1), ("none", 2)])
def test_when_kernels_are_made_for_a_shape_is_told_and_known(
    asked: str, set_to: int, opened: Open
) -> None:
    runner, _, engine = opened(product="tensorrt-rtx", specialize=asked)
    assert right(runner, x(1, 4))
    assert engine.contexts[0].how.dynamic_shapes_kernel_specialization_strategy == set_to
    assert runner.specialize == asked
    assert opened()[0].specialize is None
