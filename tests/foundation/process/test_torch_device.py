"""The device that a recipe names: found, refused with what to do, and its memory compared."""

from __future__ import annotations

import pytest
import torch

from optimizer.foundation.errors import MachineError
from optimizer.foundation.process import torch_device
from optimizer.foundation.process.torch_device import CPU, check_memory, move, resolve
from tests.gpu.stand_in import GPU, stand_in

OLD = "torch 2.13 cannot use a GPU (The NVIDIA driver on your system is too old)"


def test_auto_computes_on_the_cpu_where_no_gpu_can_be_used_and_cuda_is_refused() -> None:
    assert resolve("auto", "compress.device", lambda: OLD) == CPU
    with pytest.raises(MachineError, match="driver on your system is too old") as refused:
        resolve("cuda", "compress.device", lambda: OLD)
    assert refused.value.exit_code == 5
    assert refused.value.where == "compress.device"
    assert "Set device: cpu or auto" in refused.value.fix


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_the_reason() -> None:
    assert "without CUDA" in torch_device.explain_unusable()


def test_a_gpu_with_too_little_memory_is_refused_before_any_work() -> None:
    check_memory(GPU, 2 * 10**9, 3 * 10**9, "compress.device", "Lower it.")
    check_memory(CPU, 2 * 10**9, 1, "compress.device", "Lower it.")
    with pytest.raises(MachineError, match=r"2\.0 GB of GPU memory .* allows 1\.5 GB") as refused:
        check_memory(GPU, 2 * 10**9, 15 * 10**8, "compress.device", "Lower it.")
    assert refused.value.where == "compress.device_memory_gb"
    assert refused.value.fix == "Lower it."


def test_an_expanded_mask_is_copied_once_and_stays_expanded() -> None:
    mask = torch.rand(1, 1, 4, 4).expand(3, 1, 4, 4)
    with stand_in() as gpu:
        there = move(({"mask": mask},), gpu)[0]["mask"]
        assert there.stride()[0] == 0
        assert torch.equal(there.cpu(), mask)
