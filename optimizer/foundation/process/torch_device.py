"""The device on which torch computes: choose it, check it, and move values to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import MachineError
from optimizer.foundation.sections.fields import Device

CPU = torch.device("cpu")
CONTEXT = 600 << 20  # GPU memory of CUDA's context and its libraries (assumed, unmeasured)
Unusable = Callable[[], str]


def explain_unusable() -> str:
    """Return the reason why torch cannot compute on a GPU of this machine; "" where it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    try:
        torch.cuda.init()
        torch.zeros(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as e:  # no driver, an old one, a GPU without kernels
        return f"torch {torch.__version__} cannot use a GPU ({str(e).splitlines()[0]})"
    return ""


def resolve(device: Device, where: str, reason: Unusable = explain_unusable) -> torch.device:
    """Return the torch device for a recipe's value: for auto a GPU where torch can compute on one,
    else the CPU. Raises MachineError for cuda where it cannot.

    where: place in the recipe
    reason: function that replaces `explain_unusable`
    """
    if device == "cpu":
        return CPU
    why = reason()
    if not why:
        return torch.device("cuda", torch.cuda.current_device())
    if device == "cuda":
        raise MachineError(
            why,
            where=where,
            accepted="auto, cpu, or cuda with an NVIDIA GPU, its driver and a build of torch for "
            "both",
            fix=f"Set {where.rpartition('.')[2]}: cpu or auto. For a GPU: `nvidia-smi` shows the "
            "driver and its CUDA version; install the build of torch for it (pytorch.org).",
        )
    return CPU


def check_memory(
    device: torch.device, needed: int, budget: int | None, where: str, fix: str
) -> None:
    """Raise MachineError where a step needs more memory on a GPU than the recipe allows, or than is
    free.

    needed: predicted bytes
    budget: bytes that the recipe allows (key device_memory_gb beside `where`); None: all free bytes
    where: key of the device in the recipe
    fix: advice for the message
    """
    if device.type == "cpu":
        return
    free = None if device.type != "cuda" else torch.cuda.mem_get_info(device)[0]
    for place, limit, words in (
        (f"{where.rpartition('.')[0]}.device_memory_gb", budget, "it allows"),
        (where, free, f"{name_of(device)} has free"),
    ):
        if limit is not None and needed > limit:
            raise MachineError(
                f"about {needed / 1e9:.1f} GB of GPU memory are needed, and {words} "
                f"{limit / 1e9:.1f} GB",
                where=place,
                fix=fix,
            )


@contextmanager
def computing(device: torch.device, budget: int | None, where: str, fix: str) -> Iterator[None]:
    """Inside, torch on a GPU chooses kernels that give the same bits in every run, convolves in
    float32 without TF32, and takes at most `budget` bytes. On the CPU nothing changes.

    budget: bytes; None: no limit
    where: key of the device in the recipe
    fix: advice for the message

    Raises MachineError where the memory does not suffice.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    convolutions: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]  # made at run time
    precision = convolutions.fp32_precision
    total = torch.cuda.get_device_properties(device).total_memory
    convolutions.fp32_precision = "ieee"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.cuda.set_per_process_memory_fraction(min(1.0, (budget or total) / total), device)
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise MachineError(
            f"the memory of {torch.cuda.get_device_name(device)} does not suffice "
            f"({str(e).splitlines()[0]})",
            where=where,
            fix=fix,
        ) from e
    finally:
        convolutions.fp32_precision = precision
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def name_of(device: torch.device) -> str:
    """Return the name of a GPU, such as "NVIDIA L4"; for other devices the type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wait_for_device(device: torch.device) -> None:
    """Wait for the work of a GPU, so that a clock shows the time it took."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sums_of(device: torch.device) -> tuple[Any, str]:
    """Return (torch's settings of float32 matrix products on a device, name of the narrower
    precision that they may allow), which is bf16 on the CPU and TF32 on a GPU."""
    backends: Any = torch.backends
    if device.type == "cpu":
        return backends.mkldnn.matmul, "bf16"
    return backends.cuda.matmul, "tf32"


def move(value: Any, device: torch.device) -> Any:
    """Move tensors to a device: return `value` with all tensors in its tuples, lists and dicts
    moved to a device. Of an expanded tensor only one slice is copied."""
    if device.type == "cpu":
        return value
    if isinstance(value, Tensor):
        kept = value
        for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
            kept = kept.narrow(axis, 0, 1) if size > 1 and stride == 0 else kept
        return kept.to(device).expand(value.shape)
    if isinstance(value, tuple | list):
        return type(value)(move(one, device) for one in value)
    if isinstance(value, dict):
        return {name: move(one, device) for name, one in value.items()}
    return value
