"""Examine this machine for `optimize doctor`: targets that it can build and run, engines of a
bundle that it can run, and pip commands for missing packages."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Collection, Mapping, Set
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.fit import judge_engines
from optimizer.harness.bundle.fit_columns import REQUIRED, FitContext, processor
from optimizer.harness.runtimes import table
from optimizer.harness.runtimes.machine import Machine, describe_machine
from optimizer.store import package_version
from optimizer.targets import TARGETS

DEVICES = ("cpu", "cuda", "gpu", "npu")
LISTED = ("torch", "transformers", "onnx", "onnxscript", "datasets", "tokenizers")


def examine(machine: Machine | None = None) -> dict[str, Any]:
    """Examine this machine for `optimize doctor`: {machine: {...}, packages: {name: version},
    devices: {runtime: {id: full name}}, targets: [{runtime, provider, builds, runs, reason, fix}]},
    with one target per provider of the harness and one per target that other programs run.

    Imports no heavy package except runtimes that alone can list their devices (OpenVINO).
    """
    here = machine or describe_machine()
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
        + [_served_target(name, here) for name in TARGETS if not table.look_up(name).runs],
    }


def _served_target(runtime: str, machine: Machine) -> dict[str, Any]:
    """Return the row of `optimize doctor` on a target that other programs run, such as vLLM."""
    target, served_by = TARGETS[runtime], table.look_up(runtime).served_by
    missing = [name for name in target.judged_by if machine.version((name,)) is None]
    if not target.judged_by and machine.version(target.distributions) is None:
        missing = [target.distributions[0]]
    extras = "".join(f"pip install 'optimize-toolchain[{e}]'" for e in target.extras.values())
    return {
        "runtime": runtime,
        "provider": "",
        "builds": not missing,
        "runs": False,
        "reason": _not_installed(missing) if missing else f"run by {served_by}",
        "fix": extras if missing else "",
    }


def _not_installed(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def _devices(
    machine: Machine, names: Collection[str] = tuple(table.RUNTIMES)
) -> dict[str, dict[str, str]]:
    """Return for `optimize doctor` {runtime: {device id: full name}} of installed runtimes that
    list their devices. names: runtimes to look for."""
    from optimizer.harness.errors import MachineError

    listed = {}
    for name, row in table.RUNTIMES.items():
        packages = next(iter(row.required.values()), ((),))[0]
        if name in names and row.devices and machine.version(packages) is not None:
            with suppress(MachineError):
                listed[name] = dict(row.lister().list_devices())
    return listed


def _absent(runtime: str, device: str, devices: Mapping[str, Mapping[str, str]]) -> str:
    """Explain for `optimize doctor` why `device` is not among the devices that a runtime lists; ""
    where it is, and for a runtime whose devices were not listed.

    devices: {runtime: {device: its description}}
    """
    present = devices.get(runtime)
    return str(table.look_up(runtime).lister().explain_absent(device, present)) if present else ""


def _target(
    runtime: str, provider: str, machine: Machine, devices: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return a provider's row of `optimize doctor`, by the harness's decision about a deferred
    engine."""
    row = table.look_up(runtime)
    fit = {"driver_minimum": row.driver_minimum} if row.driver_minimum else {}
    on_cuda = provider == "cuda" or provider not in DEVICES
    engine: dict[str, Any] = {
        "target": runtime,
        "runtime": runtime,
        "device": "cuda" if on_cuda else provider,
        "provider": provider if provider not in DEVICES else None,
        "model_files": [],
        "deferred": True,
        "fit": fit,
    }
    absent = _absent(runtime, provider, devices)
    (verdict,) = judge_engines(
        {"engines": [engine]}, machine, failed={0: absent} if absent else None
    )
    groups = REQUIRED[runtime, provider]
    missing = [group[0] for group in groups if machine.version(group) is None]
    runs = verdict.how is not None
    builds = runs  # without engine files, a build opens the model
    if row.engine_files:
        builds = groups[0][0] not in missing and not (row.needs_gpu and machine.gpu is None)
    extra = TARGETS[runtime].extras.get(provider)
    fix = verdict.install
    if extra and missing and not fix:  # no GPU: the packages still build
        fix = f"pip install 'optimize-toolchain[{extra}]'"
    reasons = ["no NVIDIA GPU was found"] if on_cuda and machine.gpu is None else []
    reasons += [_not_installed(missing)] if missing else []
    reason = absent or "; ".join(reasons) or verdict.why.partition(": ")[2]
    return {
        "runtime": runtime,
        "provider": provider,
        "builds": builds,
        "runs": runs,
        "reason": _ready(engine, machine) if runs else reason,
        "fix": fix,
    }


def _ready(engine: dict[str, Any], machine: Machine) -> str:
    """Return for `optimize doctor` "ready", and the models that this processor would answer
    wrongly."""
    if not table.look_up(engine["runtime"]).saturates:
        return "ready"
    integers = {**engine, "fit": {"integer_products": True}}
    why = processor(FitContext(integers, machine, frozenset()))
    return f"ready, but models with INT8 activations are refused: {why}" if why else "ready"


def examine_engines(folder: Path, machine: Machine | None = None) -> list[dict[str, Any]]:
    """Examine for `optimize doctor` and `inspect` a bundle's engines: {target, how, why, install}
    per engine; how: None if it cannot run here.

    Raises harness.errors.BundleError where the folder is not a bundle, or a file that every engine
    needs is damaged.
    """
    from optimizer.harness.bundle.manifest import read_manifest, refuse_damage

    manifest = read_manifest(folder)
    return list_engines(manifest, refuse_damage(folder, manifest), machine)


def list_engines(
    manifest: Mapping[str, Any], damaged: Set[str], machine: Machine | None = None
) -> list[dict[str, Any]]:
    """Return the rows of `examine_engines`. damaged: names of damaged files."""
    here = machine or describe_machine()
    devices = _devices(here, {str(e["runtime"]) for e in manifest["engines"]})
    failed = {
        i: why
        for i, e in enumerate(manifest["engines"])
        if (why := _absent(e["runtime"], e["device"], devices))
    }
    rows = judge_engines(manifest, here, damaged=damaged, failed=failed)
    return [{"target": r.target, "how": r.how, "why": r.why, "install": r.install} for r in rows]


def format_document(document: dict[str, Any]) -> str:
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
