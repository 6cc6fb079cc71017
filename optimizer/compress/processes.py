"""Processes that walk over the blocks together, each with a share of the calibration data.

All of them compress every block, by the same sums (walk/deal.py); the first writes the results.
After one was killed all start again, after the last finished block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import MachineError
from optimizer.foundation.process import torch_device
from optimizer.foundation.process.launch import EndedError, Group, Processes, launch
from optimizer.foundation.progress import say
from optimizer.foundation.state import CompressedState
from optimizer.recipe.schema import Compression
from optimizer.store import package_version

WHERE = "compress.processes"
FIX = (
    "If memory ran out, use fewer processes. The same command resumes after the last finished "
    "block, with any number of processes."
)


def count_of(section: Compression) -> int:
    """Return the number of processes that walk over the blocks: compress.processes, or 1 where the
    work cannot be shared."""
    return 1 if explain_alone(section) else section.compress.processes


def explain_alone(section: Compression) -> str:
    """The reason why one process walks although the recipe asks for several, or ""."""
    if section.compress.processes == 1:
        return ""
    if section.effective.calibrate is None:
        return "no method here reads activations"
    for method in section.quantize.of_kind("block-tuning"):
        return f"{method.name} learns from all calibration data in one order"
    return ""


def check(section: Compression) -> None:
    """Raise MachineError where this machine cannot run the processes that share the walk over the
    blocks."""
    count = count_of(section)
    if count == 1:
        return
    if package_version("accelerate") is None:
        raise MachineError(
            "accelerate is not installed, and calibration in several processes needs it",
            where=WHERE,
            fix="pip install 'optimize-toolchain[accelerate]', or set processes: 1.",
        )
    device = torch_device.resolve(section.compress.chosen_device, "compress.device")
    if device.type == "cuda" and count > torch.cuda.device_count():
        raise MachineError(
            f"{count} processes and {torch.cuda.device_count()} GPUs",
            where=WHERE,
            accepted=f"1 to {torch.cuda.device_count()}",
            fix="Use fewer processes.",
        )


def start(function: Callable[..., object], count: int, progress: Path, *arguments: Any) -> None:
    """Run function(processes, *arguments) in `count` processes that walk over the blocks. Where one
    is killed, start all again, unless no block was finished since the last time.

    progress: folder of finished blocks
    """
    group = Group(count, "cpu", WHERE, FIX)  # which exchanges sums in the machine's memory
    before = -1
    while True:
        try:
            launch(function, group, progress, *arguments)
            return
        except EndedError as e:
            done = len(list_finished(progress))
            if done == before:
                raise
            before = done
            say(f"compress: {e.problem}; all start again after {done} finished blocks")


def list_finished(progress: Path) -> list[Path]:
    """List the folders of blocks that the walk has compressed, in order."""
    return sorted(folder for folder in progress.iterdir() if folder.name.isdigit())


def check_same(part: CompressedState, block: str, processes: Processes) -> None:
    """Raise MachineError where the processes compressed a block to different values."""
    if len(set(processes.gather(_digest(part)))) > 1:
        raise MachineError(
            f"the processes compressed {block} to different values, which the same sums cannot "
            "give on equal processors",
            where=WHERE,
            fix="Set processes: 1.",
        )


def _digest(part: CompressedState) -> str:
    digest = hashlib.sha256(repr(sorted(part.ranges.items())).encode())
    for tensor in _tensors(part):
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(part: CompressedState) -> Iterable[Tensor]:
    for q in part.weights.values():
        yield from (t for t in (q.integers, q.scale, q.zero_point) if t is not None)
    yield from part.replaced.values()
    yield from part.factors.values()
