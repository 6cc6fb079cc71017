"""Checks of the real packages on a machine without a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.trt import caches
from optimizer.harness.runtimes.trt.build import builder
from optimizer.harness.runtimes.trt.cuda import Cuda
from optimizer.harness.runtimes.trt.run import TrtRunner
from optimizer.harness.runtimes.trt.session import allocator
from tests.harness import standin_gpu as standin


def test_a_runner_without_a_gpu_fails_with_the_drivers_words(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    if describe_machine().gpu is not None:
        pytest.skip("there is a GPU")
    with pytest.raises(MachineError, match=r"cudaGetDeviceCount failed: .+|no GPU was found"):
        TrtRunner(standin.engine_file(tmp_path))


def test_an_output_allocator_is_one_to_the_real_package() -> None:
    real: Any = pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    gpu = standin.Runtime()
    made = allocator(real, Cuda(gpu))
    assert isinstance(made, real.IOutputAllocator)
    first = made.reallocate_output("y", 0, 64, 256)
    assert made.reallocate_output_async("y", first, 32, 256, 0) == first
    made.notify_shape("y", real.Dims([2, 4]))
    assert made.shapes == {"y": (2, 4)}
    made.close()
    assert gpu.live == {}


def test_a_builder_that_does_not_start_says_where_it_would() -> None:
    def nothing(log: Any) -> None:
        raise TypeError("factory function returned nullptr")

    silent = SimpleNamespace(messages=[("error", "CUDA initialization failure")])
    with pytest.raises(MachineError, match=r"CUDA initialization failure.*on_missing: defer"):
        builder._builder(SimpleNamespace(Builder=nothing), silent, "tensorrt")


class Timings:
    """IBuilderConfig, of a GPU whose caches start with b"here"."""

    def __init__(self) -> None:
        self.set: bytes | None = None

    def create_timing_cache(self, data: bytes) -> bytes | None:
        return None if data == b"damaged" else data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        taken = not cache or cache.startswith(b"here")
        if taken:
            self.set = cache
        return taken


@pytest.mark.parametrize(
    ("held", "taken"),
    [(b"here 1", b"here 1"), (b"there", b""), (b"damaged", b""), (None, b"")],
)
def test_timings_of_this_gpu_are_used_and_others_are_measured_again(
    held: bytes | None, taken: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "timing.cache"
    if held is not None:
        path.write_bytes(held)
    config = Timings()
    caches.timing_cache(config, path)
    assert config.set == taken
