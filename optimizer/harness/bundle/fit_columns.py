"""Columns of the fit table: each returns why an engine cannot run here, or "".

A column compares one requirement of an engine in the manifest with one property of the machine.
fit.py calls them in its order.

    runner        the harness can run engines of this runtime
    package       the packages that run it are installed: REQUIRED
    version       the installed runtime is one the harness runs, not below runtime_minimum; to load
                  an engine, the one that built it, or a later one that opens it
    gpu           a GPU exists, where the device is cuda
    driver        not below driver_minimum
    processor     it has the float type of the engine, and exact integer products
    built         an engine file exists: deferred ones were not built with the bundle
    digest        the files match the digests of the manifest
    system        operating system and processor
    architecture  the GPU is one of those the engine was built for
    builder       the installed builder makes engines for this GPU
    tried         it was tried on this machine, and failed

TensorRT (docs.nvidia.com, TensorRT 11.4, Engine Compatibility and Support Matrix): an engine opens
in the version that built it; one built version_compatible also in later versions of the same
major, and from 10 in 11.

It runs on the GPU model that built it; built for the same compute capability, on any GPU of it;
built ampere_plus, on 8.0 and later. Engines do not move between operating systems. TensorRT-RTX
(its header, see runtimes/trt/header.py): the same version, and the compute capabilities of its
mask. Its documentation says that engines move between Windows and Linux; that is untried here, and
another system is built for anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from ..runtimes import table
from ..runtimes.machine import Gpu, Machine
from ..runtimes.table import RUNTIMES, Runtime
from ..runtimes.versions import parse_version

# (runtime, provider) -> groups of distributions: Runtime.required
REQUIRED = {
    (r.name, provider): groups for r in RUNTIMES.values() for provider, groups in r.required.items()
}
BF16 = {"amx_bf16", "avx512_bf16", "avx_ne_convert"}  # flags, one of which is enough
FP16 = {"avx512_fp16"}
VNNI = {"amx_int8", "avx512_vnni", "avx_vnni"}
TENSORRT_BUILDS_FROM = (7, 5)
OPENS_OLDER_MAJOR = {(10, 11)}  # (built by, opened by): version-compatible engines only


@dataclass(frozen=True)
class FitContext:
    """Bundle's engine and machine, which a column of the fit compares.

    engine: entry of the manifest
    damaged: names of damaged files of the bundle
    """

    engine: Mapping[str, Any]
    machine: Machine
    damaged: Set[str]

    @property
    def fit(self) -> Mapping[str, Any]:
        fit: Mapping[str, Any] = self.engine["fit"]
        return fit

    @property
    def runtime(self) -> str:
        return str(self.engine["runtime"])

    @property
    def required(self) -> tuple[tuple[str, ...], ...]:
        """Groups of packages that the bundle's engine needs, of each of which one must be
        installed; () for an unknown runtime."""
        provider = self.engine.get("provider") or self.engine["device"]
        return self.record.required.get(provider, ())

    @property
    def record(self) -> Runtime:
        return table.look_up(self.runtime)

    @property
    def installed(self) -> str | None:
        """Installed version of the engine's runtime; None if it is not installed."""
        return self.machine.version(self.required[0]) if self.required else None

    @property
    def gpu(self) -> Gpu:
        """The machine's GPU. Columns before `gpu` must not read it, because it may be missing."""
        assert self.machine.gpu is not None
        return self.machine.gpu


Column = Callable[[FitContext], str]


def runner(a: FitContext) -> str:
    """Explain why the harness does not run a bundle's engines of this runtime, or ""."""
    if a.runtime in a.machine.runners and a.required:
        return ""
    if a.record.served_by:
        return f"{a.runtime} models are run by {a.record.served_by}, not by the harness"
    provider = a.engine.get("provider")
    what = f"{a.runtime} models with {provider}" if provider else f"{a.runtime} engines"
    return f"this version of the harness does not run {what} yet"


def package(a: FitContext) -> str:
    """Name the packages of the engine's runtime that are not installed, or ""."""
    missing = [group[0] for group in a.required if a.machine.version(group) is None]
    if not missing:
        return ""
    return f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"


def runnable(a: FitContext) -> str:
    """Return why the installed runtime of a bundle's engine is too old or too new for the harness;
    the first half of the column `version`."""
    here, lowest = a.installed or "", a.fit.get("runtime_minimum", "")
    if parse_version(here) < parse_version(lowest):
        return f"{a.runtime} {here} is older than {lowest}"
    if a.record.versions is not None:
        oldest, beyond = a.record.versions
        if not parse_version(oldest) <= parse_version(here) < parse_version(beyond):
            return f"{a.runtime} {here} is not supported; {oldest} and later, before {beyond}, are"
    return ""


def gpu(a: FitContext) -> str:
    """State that the bundle's engine needs a GPU and the machine has none, or return ""."""
    return "no GPU was found" if a.engine["device"] == "cuda" and a.machine.gpu is None else ""


def driver(a: FitContext) -> str:
    """State that the GPU's driver is older than the bundle's engine needs, or return ""."""
    lowest = a.fit.get("driver_minimum", "")
    if a.engine["device"] != "cuda" or parse_version(a.gpu.driver) >= parse_version(lowest):
        return ""
    return f"driver {a.gpu.driver} is older than {lowest}"


SATURATES = "it multiplies int8 by int8, whose sums saturate without VNNI"


def processor(a: FitContext) -> str:
    """Return which number format of the bundle's engine this processor lacks, or "".

    "" too if the processor's features are not known. Without VNNI, OpenVINO's oneDNN adds two int8
    products in 16 bits, which saturate (vpmaddubsw): answers are then off by a tenth, without an
    error.
    """
    features = set(a.machine.cpu_features)
    if not features or a.engine.get("device", "cpu") != "cpu":
        return ""
    listed = ", ".join(a.machine.cpu_features)
    if a.fit.get("float") == "bf16" and not BF16 & features:
        return f"it computes in bf16, of which this processor has none ({listed})"
    if a.fit.get("float") == "fp16" and not FP16 & features:
        return f"it computes in fp16, of which this processor has none ({listed})"
    if a.fit.get("integer_products", False) and not VNNI & features:
        return f"{SATURATES} ({listed})"
    return ""


def built(a: FitContext) -> str:
    """State that no engine file was built with the bundle, or return ""."""
    return "it was not built where the bundle was made" if a.engine["deferred"] else ""


def engine_digest(a: FitContext) -> str:
    """Return why the bundle's engine file, or the model from which it reads weights, is damaged; or
    ""."""
    if a.engine["engine"] in a.damaged:
        return f"damaged: {a.engine['engine']}"
    return model_digest(a) if a.fit.get("strip_weights", False) else ""


def model_digest(a: FitContext) -> str:
    """Name the damaged files of the bundle's portable model, or ""."""
    wrong = sorted(a.damaged & set(a.engine["model_files"]))
    return f"damaged: {', '.join(wrong)}" if wrong else ""


def version(a: FitContext) -> str:
    """Explain why the installed runtime does not open the bundle's engine file, or ""."""
    by, here = a.fit["runtime_version"], a.installed or ""
    if by == here or (a.fit.get("version_compatible", False) and _opens(by, here)):
        return ""
    return f"built by {by}, {here} is installed"


def _opens(by: str, here: str) -> bool:
    """Return True if version `here` of TensorRT opens a version-compatible engine built by `by`."""
    older, newer = parse_version(by), parse_version(here)
    if not older or not newer:
        return False
    if older[0] != newer[0]:
        return (older[0], newer[0]) in OPENS_OLDER_MAJOR
    return newer >= older


def system(a: FitContext) -> str:
    """Explain why the bundle's engine does not run on this operating system and processor, or
    ""."""
    here, there = (a.machine.os, a.machine.architecture), (a.fit["os"], a.fit["architecture"])
    return "" if here == there else f"built for {' '.join(there)}, this is {' '.join(here)}"


def architecture(a: FitContext) -> str:
    """Explain why the bundle's engine does not run on this model of GPU, or ""."""
    if not a.record.compute_capabilities:
        return _tensorrt_architecture(a)
    if capability(a.gpu.compute_capability) in a.fit["compute_capabilities"]:
        return ""
    built_for = ", ".join(a.fit["compute_capabilities"])
    return f"built for compute capability {built_for}, this GPU is {a.gpu.compute_capability}"


def _tensorrt_architecture(a: FitContext) -> str:
    """Explain why the GPU is outside the engine's hardware compatibility level of TensorRT, or
    ""."""
    level = a.fit.get("hardware_compatible", "none")
    built_for, here = a.fit["compute_capabilities"], a.gpu.compute_capability
    if level == "ampere_plus":
        older = parse_version(here) < (8, 0)
        return f"built for 8.0 and later, this GPU is {here}" if older else ""
    if capability(here) not in built_for:
        return f"built for compute capability {', '.join(built_for)}, this GPU is {here}"
    if level == "same_compute_capability" or a.fit.get("gpu") == a.gpu.name:
        return ""
    return f"built on {a.fit.get('gpu') or 'a GPU not named'}, this is {a.gpu.name}"


def profiles(fit_shapes: Any) -> list[dict[str, Any]]:
    """Expand the manifest's shapes of an engine to a list of profiles, {axis: [min, opt, max]}.

    The manifest holds one profile, a list, or a profile with "buckets" that each replace some axes.
    """
    if isinstance(fit_shapes, list):
        return fit_shapes
    whole = {axis: span for axis, span in fit_shapes.items() if axis != "buckets"}
    return [
        whole | {axis: span for axis, span in bucket.items() if span is not None}
        for bucket in fit_shapes.get("buckets") or [{}]
    ]


def builder(a: FitContext) -> str:
    """Explain why the installed builder makes no engine from the bundle for this GPU, or ""."""
    here = a.gpu.compute_capability
    named = a.record.compute_capabilities
    makes = capability(here) in named if named else parse_version(here) >= TENSORRT_BUILDS_FROM
    return "" if makes else f"{a.runtime} makes no engine for compute capability {here}"


def install(a: FitContext) -> str:
    """Return the pip command that would install the runtime of a bundle's engine, or "" where no
    package is missing or would help."""
    if runner(a) or gpu(a):  # no package would help
        return ""
    lowest = a.fit.get("runtime_minimum", "")
    requirements = []
    for i, group in enumerate(a.required):
        least = lowest if i == 0 else ""
        installed = a.machine.version(group)
        if installed is None or parse_version(installed) < parse_version(least):
            requirements.append(f'"{group[0]}>={least}"' if least else group[0])
    return f"pip install {' '.join(requirements)}" if requirements else ""


def capability(dotted: str) -> str:
    """Convert a compute capability "8.9" to the form in a bundle's engines, "89"."""
    return dotted.replace(".", "")
