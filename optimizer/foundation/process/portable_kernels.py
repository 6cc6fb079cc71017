"""Float kernels that give the same bytes on every x86-64 processor.

torch, MKL and oneDNN choose kernels by the processor; those that sum in another order or fuse
multiply and add round differently. In a process with ENVIRONMENT, inside `use_portable_kernels`,
torch runs its kernels for any x86-64, MKL its "COMPATIBLE" branch of conditional numerical
reproducibility (oneMKL developer guide), oneDNN is off, and sums use one thread.

Libraries read both variables once while they load, so only the command line (optimizer/cli.py) sets
them, before torch is imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import MachineError

ENVIRONMENT: Mapping[str, str] = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}
BRANCH, COMPATIBLE = 1, 3
"""Argument of MKL's mkl_cbwr_get (MKL_CBWR_BRANCH), and its expected result."""


@contextmanager
def use_portable_kernels() -> Iterator[None]:
    """Inside, run torch without oneDNN, on one thread."""
    import torch

    mkldnn: Any = torch.backends.mkldnn  # whose flags() warns on a machine without an Intel GPU
    before = mkldnn.enabled, torch.get_num_threads()
    mkldnn.enabled = False
    torch.set_num_threads(1)
    try:
        yield
    finally:
        mkldnn.enabled = before[0]
        torch.set_num_threads(before[1])


def check() -> None:
    """Check this process for portable kernels: raise MachineError where torch, MKL or oneDNN would
    choose kernels by the processor, or sums would use several threads."""
    import torch

    others = {
        "torch's kernels for this processor": torch.backends.cpu.get_cpu_capability() != "DEFAULT",
        "oneDNN's": torch.backends.mkldnn.enabled,
        "several threads": torch.get_num_threads() != 1,
        "MKL's for this processor": _mkl_branch(Path(torch.__file__).parent) != COMPATIBLE,
    }
    if any(others.values()):
        raise MachineError(
            "this process runs " + ", ".join(name for name, there in others.items() if there),
            where="compress.deterministic",
            accepted="an x86-64 processor, torch with MKL, and `optimize` as the command",
            fix="Run the recipe by `optimize run`, which starts such a process, or leave "
            "deterministic out.",
        )


def _mkl_branch(torch_folder: Path) -> int | None:
    """Return the number of the code branch that the MKL inside torch uses; None if torch has no
    MKL."""
    try:
        library = ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(BRANCH))
    except (OSError, AttributeError):
        return None
