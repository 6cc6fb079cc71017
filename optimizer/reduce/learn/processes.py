"""Train one model in several processes, each with a share of every batch.

Data parallelism: every process has both models on its own device and computes the gradient of its
rows; each steps by the sum of all gradients, so their weights stay equal. After one was killed, the
next run resumes from the training's checkpoint (training.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.errors import MachineError
from optimizer.foundation.process import launch as launches
from optimizer.foundation.process import torch_device
from optimizer.foundation.process.launch import Group
from optimizer.recipe.recover import Learning
from optimizer.store import package_version


def choose_device(section: Learning) -> torch.device:
    """Return the device on which this process trains its models. Raises MachineError for a GPU that
    torch cannot use."""
    return torch_device.resolve(section.device, f"{section.PLACE}.device")


def count_of(section: Learning) -> int:
    """Return the number of processes that train. "auto" is one per GPU, at most one per row of a
    batch, and one on a CPU. Raises MachineError for more processes than GPUs."""
    on_gpu = choose_device(section).type == "cuda"
    devices = torch.cuda.device_count() if on_gpu else 1
    if section.processes == "auto":
        return min(devices, section.batch_size)
    if on_gpu and section.processes > devices:
        raise MachineError(
            f"{section.processes} processes and {devices} GPUs",
            where=f"{section.PLACE}.processes",
            accepted=f"1 to {devices}",
            fix="Set processes: auto.",
        )
    return section.processes


def check(section: Learning) -> None:
    """Raise MachineError, before anything is read, where a training cannot run on this machine."""
    if count_of(section) > 1 and package_version("accelerate") is None:
        raise MachineError(
            "accelerate is not installed, and training in several processes needs it",
            where=f"{section.PLACE}.processes",
            fix="pip install 'optimize-toolchain[accelerate]', or set processes: 1.",
        )


def launch(
    function: Callable[..., object], section: Learning, folder: Path, *arguments: Any
) -> None:
    """Run function(processes, *arguments) in count_of(section) new processes, and wait. Raises as
    foundation/process/launch.py does."""
    group = Group(
        count_of(section),
        choose_device(section).type,
        f"{section.PLACE}.processes",
        "If memory ran out, use fewer processes or a smaller batch_size. The same command resumes "
        "at the last checkpoint.",
    )
    launches.launch(function, group, folder, *arguments)
