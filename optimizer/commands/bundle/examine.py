"""Examine this machine for `optimize doctor`: targets that it can build and run, engines of a
bundle that it can run, and pip commands for missing packages."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.fit import verdicts
from optimizer.harness.bundle.fit_columns import REQUIRED
from optimizer.harness.runtimes import table
from optimizer.harness.runtimes.machine import Machine, this_machine
from optimizer.store import package_version
from optimizer.targets import TARGETS

DEVICES = ("cpu", "cuda", "gpu", "npu")
LISTED = ("torch", "transformers", "onnx", "onnxscript", "datasets", "tokenizers")


def examine(machine: Machine | None = None) -> dict[str, Any]:
    """Return {machine: {...}, packages: {name: version}, devices: {runtime: {id: full name}},
    targets: [{runtime, provider, builds, runs, reason, fix}]}, with one target per provider of the
    harness and one per target that other programs run.

    Imports no heavy package except runtimes that alone can list their devices (OpenVINO).
    """
    here = machine or this_machine()
    devices = _devices(here)
    disk = shutil.disk_usage(".")
    runtimes = dict.fromkeys(d for groups in REQUIRED.values() for group in groups for d in group)
    return {
        "machine": {
            "os": platform.platform(),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "disk_free_bytes": disk.free,
            "nvidia_gpu": here.gpu is not None,
            "gpu": None if here.gpu is None else vars(here.gpu),
        },
        "packages": {
            **{name: package_version(name) for name in LISTED},
            **{name: here.packages.get(name) for name in runtimes},
        },
        "devices": devices,
        "targets": [_target(runtime, provider, here, devices) for runtime, provider in REQUIRED]
        + [_served_target(name, here) for name in TARGETS if not table.of(name).runs],
    }


def _served_target(runtime: str, machine: Machine) -> dict[str, Any]:
    """Return the row of a target that other programs run."""
    target, served_by = TARGETS[runtime], table.of(runtime).served_by
    missing = [name for name in target.distributions if machine.version((name,)) is None]
    extras = "".join(f"pip install 'optimize-toolchain[{e}]'" for e in target.extras.values())
    return {
        "runtime": runtime,
        "provider": "",
        "builds": not missing,
        "runs": False,
        "reason": f"{' and '.join(missing)} not installed" if missing else f"for {served_by}",
        "fix": extras if missing else "",
    }


def _devices(machine: Machine) -> dict[str, dict[str, str]]:
    """Return {runtime: {device id: full name}} of installed runtimes that list their devices."""
    from optimizer.harness.errors import MachineError

    listed = {}
    for name, row in table.RUNTIMES.items():
        packages = next(iter(row.required.values()), ((),))[0]
        if row.devices and machine.version(packages) is not None:
            with suppress(MachineError):
                listed[name] = dict(row.lister().available())
    return listed


def _absent(runtime: str, device: str, devices: Mapping[str, Mapping[str, str]]) -> str:
    """Return the reason why a runtime's list lacks `device`; "" where present or without a list."""
    present = devices.get(runtime)
    return str(table.of(runtime).lister().absent(device, present)) if present else ""


def _target(
    runtime: str, provider: str, machine: Machine, devices: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return a provider's row, by the harness's decision about a deferred engine."""
    row = table.of(runtime)
    fit = {"driver_minimum": row.driver_minimum} if row.driver_minimum else {}
    engine: dict[str, Any] = {
        "target": runtime,
        "runtime": runtime,
        "device": provider if provider in DEVICES else "cuda",
        "provider": provider if provider not in DEVICES else None,
        "model_files": [],
        "deferred": True,
        "fit": fit,
    }
    absent = _absent(runtime, provider, devices)
    (verdict,) = verdicts({"engines": [engine]}, machine, failed={0: absent} if absent else None)
    installed = machine.version(REQUIRED[runtime, provider][0]) is not None
    extra = TARGETS[runtime].extras.get(provider)
    missing = f"pip install 'optimize-toolchain[{extra}]'" if extra else verdict.install
    return {
        "runtime": runtime,
        "provider": provider,
        "builds": installed and not absent and not (row.needs_gpu and machine.gpu is None),
        "runs": verdict.how is not None,
        "reason": "ready" if verdict.how else verdict.why,
        "fix": "" if installed and not verdict.install else verdict.install or missing,
    }


def bundle(folder: Path, machine: Machine | None = None) -> list[dict[str, Any]]:
    """Return {target, how, why, install} per engine of a bundle; how: None if it cannot run here.

    Raises harness.errors.BundleError where the folder is not a bundle, or a file that every engine
    needs is damaged.
    """
    from optimizer.harness.bundle.manifest import read_manifest, refuse_damage

    manifest, here = read_manifest(folder), machine or this_machine()
    devices = _devices(here)
    failed = {
        i: why
        for i, e in enumerate(manifest["engines"])
        if (why := _absent(e["runtime"], e["device"], devices))
    }
    damaged = refuse_damage(folder, manifest)
    rows = verdicts(manifest, here, damaged=damaged, failed=failed)
    return [{"target": r.target, "how": r.how, "why": r.why, "install": r.install} for r in rows]


def text(document: dict[str, Any]) -> str:
    """Format the result of `examine` for a terminal."""
    m, gpu = document["machine"], document["machine"]["gpu"]
    card = (
        f"{gpu['name']} (compute capability {gpu['compute_capability']}, driver {gpu['driver']})"
        if gpu
        else "no NVIDIA GPU"
    )
    lines = [
        f"{m['os']}, Python {m['python']}, {m['cores']} cores, "
        f"{m['memory_bytes'] / 2**30:.0f} GiB memory, {m['disk_free_bytes'] / 2**30:.0f} GiB free "
        f"disk, {card}",
        "",
    ]
    width = max(map(len, document["packages"]))
    for name, version in document["packages"].items():
        lines.append(f"  {name:<{width}}  {version or 'not installed'}")
    lines.append("")
    for runtime, devices in document["devices"].items():
        lines += [f"  {runtime} finds {name}: {full}" for name, full in devices.items()]
    for t in document["targets"]:
        can = f"builds: {'yes' if t['builds'] else 'no':<4} runs: {'yes' if t['runs'] else 'no':<4}"
        name = f"{t['runtime']} {t['provider']}"
        lines.append(f"  {name:<26}{can} {t['reason']}")
        if t["fix"]:
            lines.append(f"{'':<28}{t['fix']}")
    for row in document.get("engines", []):
        lines.append(f"  {row['how'] or 'no':<6} {row['target']}: {row['why']}")
        if row["install"]:
            lines.append(f"{'':<9}{row['install']}")
    return "\n".join(lines)
