"""Table of the products of the TensorRT family and their differences.

One backend serves all of them, because their API is the same except for this table. Nothing here
imports them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, Literal

from ...errors import BuildError, MachineError
from ..versions import parse_version

Compatibility = Literal["none", "ampere_plus", "same_compute_capability"]


@dataclass(frozen=True)
class BuildOptions:
    """Options of building a TensorRT engine, besides shapes. Precision is in the ONNX file.

    workspace_gb: maximum device memory of a running kernel in GiB; None: the builder's limit.
    sparse_weights: use kernels for 2:4 sparse weights where they are faster.
    hardware_compatible: GPUs besides the present one that the engine must run on.
    version_compatible: later versions of the runtime may load the engine.
    refittable: weights can be replaced without a build.
    strip_weights: leave out the weights, which are restored when the engine is loaded.
    compute_capabilities: GPUs to build for, e.g. "89" for 8.9; empty: the builder's default.
    """

    workspace_gb: float | None = None
    sparse_weights: bool = False
    hardware_compatible: Compatibility = "none"
    version_compatible: bool = False
    refittable: bool = False
    strip_weights: bool = False
    compute_capabilities: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> BuildOptions:
        """Read the build options of a TensorRT engine from its manifest entry; other keys are
        ignored."""
        values = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        if "compute_capabilities" in values:
            values["compute_capabilities"] = tuple(values["compute_capabilities"])
        return cls(**values)

    def changed(self) -> list[str]:
        """Return the names of the build options that differ from their defaults."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class TensorRtProduct:
    """Product of the TensorRT family: TensorRT or TensorRT-RTX.

    module: Python module
    distributions: distributions that contain `module`; the first one is recommended for
        installation
    versions: oldest accepted version and first rejected one
    needs_gpu: building an engine needs a GPU
    timing_cache: the builder measures kernels, and can store the measurements
    runtime_config: contexts accept a runtime configuration, which captures CUDA graphs and stores
        compiled kernels in a runtime cache
    options: supported fields of BuildOptions
    with_gpu: fields of BuildOptions that need a GPU for the build
    compute_capabilities: GPUs that it can build for; empty: only for the present GPU
    driver_minimum: driver of the oldest CUDA release that its libraries support
    slow_phase: name of the phase that takes most of a build, see watch.Advance; "" for none
    """

    module: str
    distributions: tuple[str, ...]
    versions: tuple[str, str]
    needs_gpu: bool
    timing_cache: bool
    runtime_config: bool
    options: frozenset[str]
    with_gpu: frozenset[str]
    compute_capabilities: tuple[str, ...]
    driver_minimum: str
    slow_phase: str = ""

    @property
    def distribution(self) -> str:
        """Return the distribution to install for TensorRT."""
        return self.distributions[0]


PRODUCTS = {
    "tensorrt-rtx": TensorRtProduct(
        module="tensorrt_rtx",
        distributions=("tensorrt-rtx",),
        versions=("1.7", "2"),
        needs_gpu=False,
        timing_cache=False,  # the calls exist but do nothing
        runtime_config=True,
        # no version_compatible, which needs a lean runtime that RTX does not ship
        options=frozenset(f.name for f in fields(BuildOptions))
        - {"hardware_compatible", "version_compatible"},
        with_gpu=frozenset(("refittable", "strip_weights")),
        compute_capabilities=("75", "80", "86", "89", "120", "121"),
        driver_minimum="580",
        slow_phase="Determining refit engines",
    ),
    "tensorrt": TensorRtProduct(
        module="tensorrt",
        distributions=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        versions=("10.3", "12"),
        needs_gpu=True,
        timing_cache=True,
        runtime_config=False,
        options=frozenset(f.name for f in fields(BuildOptions)) - {"compute_capabilities"},
        with_gpu=frozenset(),
        compute_capabilities=(),
        driver_minimum="525",
    ),
}


def version(product: str = "tensorrt-rtx") -> str | None:
    """Return the installed version of TensorRT or TensorRT-RTX without importing it; None if it is
    not installed."""
    for distribution in PRODUCTS[product].distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def import_product(product: str) -> Any:
    """Import the module of TensorRT or TensorRT-RTX. Raises MachineError if it is missing or of a
    wrong version."""
    row = PRODUCTS[product]
    oldest, beyond = row.versions
    install = f'pip install "{row.distribution}>={oldest},<{beyond}"'
    try:
        module = importlib.import_module(row.module)
    except (ImportError, OSError) as e:
        raise MachineError(
            f"{row.module} cannot be imported ({e})",
            where=f"target {product}",
            fix=f"{install}, or set on_missing: defer to skip the build.",
        ) from None
    installed = str(module.__version__)
    if not parse_version(oldest) <= parse_version(installed) < parse_version(beyond):
        raise MachineError(
            f"{row.module} {installed} is installed",
            where=f"target {product}",
            accepted=f"{oldest} and later, before {beyond}",
            fix=install,
        )
    return module


def refuse_options(product: str, options: BuildOptions) -> None:
    """Raises BuildError naming the first option or GPU that TensorRT or TensorRT-RTX does not
    support."""
    row = PRODUCTS[product]
    for name in options.changed():
        if name not in row.options:
            others = [p for p, r in PRODUCTS.items() if name in r.options]
            raise BuildError(
                f"target {product} does not support the option",
                where=name,
                fix=f"Remove it, or use a target that supports it: {', '.join(others)}.",
            )
    unknown = [c for c in options.compute_capabilities if c not in row.compute_capabilities]
    if unknown:
        raise BuildError(
            f"{product} does not support compute capability {', '.join(unknown)}",
            where="compute_capabilities",
            accepted=", ".join(row.compute_capabilities),
        )
