"""The device on which the reference model answers the rows that quality is judged on.

The ledger computes on the CPU, whose arithmetic its limits describe.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from optimizer.foundation.process import torch_device
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.validate.estimate import estimate_device_memory
from optimizer.validate.run_artifacts import REFERENCE_DEVICE, RunArtifacts

FIX = (
    "Lower validate.batch_size or validate.sequence_length, end other processes on the GPU, or set "
    "validate.reference_device: cpu."
)


def check(m: RunArtifacts) -> None:
    """Raise MachineError where the device cannot be used, or its memory does not suffice."""
    device = m.reference_device
    if device == torch_device.CPU:
        return
    tensors = open_checkpoint(m.reference).tensors
    needed = estimate_device_memory(
        m.section, {name: tensors.entry(name).shape for name in tensors}
    )
    torch_device.check_memory(device, needed, None, REFERENCE_DEVICE, FIX)
    say(f"validate: the reference answers on {torch_device.name_of(device)}")


@contextmanager
def use_device(m: RunArtifacts) -> Iterator[None]:
    """Compute the reference model's answers inside this context on the recipe's device, with the
    settings of torch_device.computing."""
    with torch_device.computing(m.reference_device, None, REFERENCE_DEVICE, FIX):
        yield
