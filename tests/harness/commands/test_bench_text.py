"""Names of processors in the output of `bench`."""

from typing import Any

import pytest

from optimizer.harness.commands.bench_text import name_processor

GPU = {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580.159"}


@pytest.mark.parametrize(
    ("device", "gpu", "name"),
    [
        ("cuda", GPU, "NVIDIA H200, driver 580.159"),
        ("cpu", GPU, "Intel Xeon, 16 threads"),
        ("gpu", None, "Intel Xeon, 16 threads"),
    ],
    ids=["on a GPU", "on the CPU beside one", "a GPU that nvidia-smi does not list"],
)
def test_the_processor_that_computed_is_named(device: str, gpu: Any, name: str) -> None:
    machine = {"cpu": "Intel Xeon", "cores": 16, "gpu": gpu}
    assert name_processor({"device": device, "machine": machine, "threads": 0}) == name
