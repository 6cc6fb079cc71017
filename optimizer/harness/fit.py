"""Which of a bundle's engines runs here, decided before anything is loaded.

An engine is machine code for one runtime version and some GPUs, and deserializing a wrong one is
at best an error. So the manifest says what each engine fits, and `decide` answers from that and a
description of the machine alone. It reads no file and imports no runtime.

The manifest's engines are tried in order. For each:

    the harness has no runner for its runtime, the runtime is not installed
    or too old, or its device is not here                      -> next engine
    its runtime runs the portable ONNX itself, and it is
    intact (deferred only means that nobody opened it before)  -> load
    it is an engine that fits and is intact                    -> load
    its portable ONNX is here and intact, and the installed
    builder makes engines for this GPU                         -> build
    otherwise                                                  -> next engine

The first engine gives Fit (load) or Rebuild (build); a later one FallBack, which names the ones
passed over; none gives Refuse.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal

from .machine import Machine


@dataclass(frozen=True)
class Fit:
    """Load manifest["engines"][index] as it is."""

    index: int
    reason: str


@dataclass(frozen=True)
class Rebuild:
    """Build manifest["engines"][index] from its portable ONNX for this machine, then load it."""

    index: int
    reason: str


@dataclass(frozen=True)
class FallBack:
    """Use a later engine; `reason` says why each earlier one was passed over."""

    index: int
    how: Literal["load", "build"]
    reason: str


@dataclass(frozen=True)
class Refuse:
    """Nothing in the bundle runs here. install: a pip line that would help, or ""."""

    reason: str
    install: str


Decision = Fit | Rebuild | FallBack | Refuse

DISTRIBUTION = {
    ("onnxruntime", "cpu"): ("onnxruntime", "onnxruntime-gpu"),
    ("onnxruntime", "cuda"): ("onnxruntime-gpu",),
    ("tensorrt-rtx", "cuda"): ("tensorrt-rtx",),
}
# Runtimes with engine files of their own -> the GPUs whose engines their builder makes.
BUILDER_TARGETS = {"tensorrt-rtx": ("75", "80", "86", "89", "120", "121")}


def decide(
    manifest: Mapping[str, Any],
    machine: Machine,
    *,
    damaged: Set[str] = frozenset(),
    shape: tuple[int, int] | None = None,
    runtime: str | None = None,
) -> Decision:
    """See the module's docstring.

    damaged: files of the bundle whose digest is not the manifest's. shape: (batch, sequence)
    that will be asked for. runtime: consider only engines of this runtime, falling back to
    nothing else.
    """
    passed: list[str] = []
    install = ""
    for index, engine in enumerate(manifest["engines"]):
        if runtime not in (None, engine["runtime"]):
            continue
        how, reason = _one(engine, machine, damaged, shape)
        if how is None:
            passed.append(f"{engine['target']}: {reason}")
            install = install or _install(engine, machine)
            continue
        if passed:
            return FallBack(index, how, "; ".join([*passed, f"{engine['target']}: {reason}"]))
        kind = Fit if how == "load" else Rebuild
        return kind(index, f"{engine['target']}: {reason}")
    if not passed:
        runtimes = ", ".join(e["runtime"] for e in manifest["engines"])
        return Refuse(f"the bundle has no engine for {runtime}; it has: {runtimes}", "")
    return Refuse("; ".join(passed), install)


def _one(
    engine: Mapping[str, Any],
    machine: Machine,
    damaged: Set[str],
    shape: tuple[int, int] | None,
) -> tuple[Literal["load", "build"] | None, str]:
    """How one engine can be had here, or None, and why."""
    obstacle = _device_obstacle(engine, machine)
    if obstacle:
        return None, obstacle
    model_damage = sorted(damaged & set(engine["model_files"]))
    if engine["runtime"] not in BUILDER_TARGETS:  # no engine files: the model is the engine
        if model_damage:
            return None, f"damaged: {', '.join(model_damage)}"
        unseen = "; it was not opened where the bundle was made" if engine["deferred"] else ""
        return "load", f"portable ONNX, and the runtime is installed{unseen}"
    misfit = _engine_misfit(engine, machine, damaged, shape)
    if not misfit:
        return "load", "the engine was built for this runtime, system and GPU"
    cannot = _builder_obstacle(engine, machine, shape)
    if model_damage:
        cannot = f"damaged: {', '.join(model_damage)}"
    if cannot:
        return None, f"{misfit}, and it cannot be built here: {cannot}"
    return "build", f"{misfit}; it is built here from the portable ONNX"


def _device_obstacle(engine: Mapping[str, Any], machine: Machine) -> str:
    """Why this machine cannot run engines of this kind at all; '' when it can."""
    runtime, fit = engine["runtime"], engine["fit"]
    if runtime not in machine.runners:
        return f"this version of the harness does not run {runtime} engines yet"
    installed = _installed(engine, machine)
    if installed is None:
        return f"{DISTRIBUTION[runtime, engine['device']][0]} is not installed"
    if _numbers(installed) < _numbers(fit.get("runtime_minimum", "")):
        return f"{runtime} {installed} is older than {fit['runtime_minimum']}"
    if engine["device"] != "cuda":
        return ""
    if machine.gpu is None:
        return "no GPU was found"
    if _numbers(machine.gpu.driver) < _numbers(fit.get("driver_minimum", "")):
        return f"driver {machine.gpu.driver} is older than {fit['driver_minimum']}"
    return ""


def _engine_misfit(
    engine: Mapping[str, Any],
    machine: Machine,
    damaged: Set[str],
    shape: tuple[int, int] | None,
) -> str:
    """Why the built engine must not be loaded here; '' when it may."""
    fit, gpu = engine["fit"], machine.gpu
    assert gpu is not None
    if engine["deferred"]:
        return "it was not built where the bundle was made"
    if engine["engine"] in damaged:
        return f"damaged: {engine['engine']}"
    installed = _installed(engine, machine)
    if installed != fit["runtime_version"]:
        return f"built by {fit['runtime_version']}, {installed} is installed"
    if (machine.os, machine.architecture) != (fit["os"], fit["architecture"]):
        return (
            f"built for {fit['os']} {fit['architecture']}, "
            f"this is {machine.os} {machine.architecture}"
        )
    if _capability(gpu.compute_capability) not in fit["compute_capabilities"]:
        built = ", ".join(fit["compute_capabilities"])
        return f"built for compute capability {built}, this GPU is {gpu.compute_capability}"
    return _shape_misfit(fit, shape)


def _shape_misfit(fit: Mapping[str, Any], shape: tuple[int, int] | None) -> str:
    for axis, size in zip(("batch", "sequence"), shape or (), strict=False):
        low, _, high = fit["shapes"][axis]
        if not low <= size <= high:
            return f"its profile takes {axis} {low} to {high}, {size} is asked for"
    return ""


def _builder_obstacle(
    engine: Mapping[str, Any], machine: Machine, shape: tuple[int, int] | None
) -> str:
    """Why the installed builder cannot make this engine for this GPU; '' when it can."""
    assert machine.gpu is not None
    known = BUILDER_TARGETS[engine["runtime"]]
    if _capability(machine.gpu.compute_capability) not in known:
        return (
            f"{engine['runtime']} makes no engine for compute capability "
            f"{machine.gpu.compute_capability}"
        )
    return _shape_misfit(engine["fit"], shape)  # a rebuild keeps the profile


def _installed(engine: Mapping[str, Any], machine: Machine) -> str | None:
    names = DISTRIBUTION[engine["runtime"], engine["device"]]
    return next((machine.packages[n] for n in names if n in machine.packages), None)


def _install(engine: Mapping[str, Any], machine: Machine) -> str:
    """The pip line that would make the engine's runtime available, or ''."""
    if engine["runtime"] not in machine.runners:  # no package would help
        return ""
    if engine["device"] == "cuda" and machine.gpu is None:
        return ""
    names = DISTRIBUTION[engine["runtime"], engine["device"]]
    minimum = engine["fit"].get("runtime_minimum", "")
    installed = _installed(engine, machine)
    if installed is not None and _numbers(installed) >= _numbers(minimum):
        return ""
    return f'pip install "{names[0]}>={minimum}"' if minimum else f"pip install {names[0]}"


def _capability(dotted: str) -> str:
    """ "8.9" as engines write it: "89"."""
    return dotted.replace(".", "")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, to compare by: "1.31.1rc1" -> (1, 31)."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
