"""Float kernels that give the same bytes on every x86-64 processor.

torch, MKL and oneDNN choose their kernels by the processor, and kernels that sum in another order
or fuse multiply and add round otherwise. In a process with ENVIRONMENT, inside `used`, torch runs
its kernels for any x86-64, MKL the branch that its conditional numerical reproducibility promises
on every processor ("COMPATIBLE", oneMKL developer guide), oneDNN none, and one thread sums.

Both variables are read once, by libraries that are being loaded, so they are set before torch is
imported: by the command line alone (optimizer/cli.py).
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
"""Of MKL: what mkl_cbwr_get is asked for, MKL_CBWR_BRANCH, and what it answers."""


@contextmanager
def used() -> Iterator[None]:
    """Without oneDNN, on one thread."""
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
    """Raise MachineError in a process that runs other kernels."""
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
    """The branch that the MKL inside torch takes; None without one."""
    try:
        library = ctypes.CDLL(str(torch_folder / "lib" / "libtorch_cpu.so"))
        return int(library.mkl_serv_cbwr_get(BRANCH))
    except (OSError, AttributeError):
        return None
