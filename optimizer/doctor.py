"""`optimize doctor`: what this machine can build and run, and the pip line for what is missing."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.util import find_spec
from typing import Any

from optimizer.harness.machine import RUNNERS
from optimizer.store import package_version
from optimizer.targets import TARGETS

EXTRAS = {
    "onnxruntime": "pip install 'optimize-toolchain[cpu]'",
    "tensorrt-rtx": "pip install 'optimize-toolchain[rtx]'",
}
MODULES = {"onnxruntime": "onnxruntime", "tensorrt-rtx": "tensorrt_rtx"}


def examine() -> dict[str, Any]:
    """{machine: {...}, packages: {name: version}, targets: [{runtime, builds, runs, reason, fix}]}.

    Looks only at what is installed and present; loads no heavy package.
    """
    nvidia = shutil.which("nvidia-smi") is not None or os.path.exists("/dev/nvidiactl")
    disk = shutil.disk_usage(".")
    return {
        "machine": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "disk_free_bytes": disk.free,
            "nvidia_gpu": nvidia,
        },
        "packages": {
            name: package_version(name)
            for name in (
                "torch",
                "transformers",
                "onnx",
                "onnxscript",
                "datasets",
                "tokenizers",
                "onnxruntime",
                "onnxruntime-gpu",
                "tensorrt-rtx",
            )
        },
        "targets": [_target(runtime) for runtime in TARGETS],
    }


def _target(runtime: str) -> dict[str, Any]:
    installed = find_spec(MODULES[runtime]) is not None
    row: dict[str, Any] = {"runtime": runtime, "builds": installed, "fix": ""}
    if not installed:
        row |= {
            "runs": False,
            "reason": f"{MODULES[runtime]} is not installed",
            "fix": EXTRAS[runtime],
        }
    elif runtime not in RUNNERS:
        row |= {"runs": False, "reason": "builds engines; this version cannot run them yet"}
    else:
        row |= {"runs": True, "reason": "ready"}
    return row


def text(document: dict[str, Any]) -> str:
    """The document as lines for a person."""
    m = document["machine"]
    lines = [
        f"{m['os']}, Python {m['python']}, {m['cores']} cores, "
        f"{m['memory_bytes'] / 2**30:.0f} GiB memory, {m['disk_free_bytes'] / 2**30:.0f} GiB free "
        f"disk, {'an NVIDIA GPU' if m['nvidia_gpu'] else 'no NVIDIA GPU'}",
        "",
    ]
    for name, version in document["packages"].items():
        lines.append(f"  {name:<18}{version or 'not installed'}")
    lines.append("")
    for t in document["targets"]:
        can = f"builds: {'yes' if t['builds'] else 'no':<4} runs: {'yes' if t['runs'] else 'no':<4}"
        lines.append(f"  {t['runtime']:<18}{can} {t['reason']}")
        if t["fix"]:
            lines.append(f"{'':<20}{t['fix']}")
    return "\n".join(lines)
