"""What the products of the TensorRT family are called, and where they differ.

One backend serves all three: the API is the same but for what this table says. Nothing here
imports any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, Literal

from ...errors import BuildError, MachineError

Compatibility = Literal["none", "ampere_plus", "same_compute_capability"]


@dataclass(frozen=True)
class Options:
    """How an engine is built, beside its shapes. Precision is not here: it is in the ONNX.

    workspace_gb: device memory a kernel may use while it runs, GiB; None: the builder's own limit.
    sparse_weights: use the kernels for 2:4 sparse weights where they are faster.
    hardware_compatible: GPUs beyond the one present that the engine must run on.
    version_compatible: later versions of the runtime may load it.
    refittable: weights can be replaced without building again.
    strip_weights: leave out the weights, which are given back when the engine is loaded.
    compute_capabilities: GPUs to build for, "89" for 8.9; the builder's own choice when empty.
    """

    workspace_gb: float | None = None
    sparse_weights: bool = False
    hardware_compatible: Compatibility = "none"
    version_compatible: bool = False
    refittable: bool = False
    strip_weights: bool = False
    compute_capabilities: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Options:
        """From plain data, as a manifest keeps it; keys it does not know are another's."""
        known = {f.name: document[f.name] for f in fields(cls) if f.name in document}
        if "compute_capabilities" in known:
            known["compute_capabilities"] = tuple(known["compute_capabilities"])
        return cls(**known)

    def chosen(self) -> list[str]:
        """Names of the options that are not at their default."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Product:
    """One member of the family.

    distributions: any of them makes `module` importable; the first is what to install. versions:
    the oldest accepted and the first that is not. needs_gpu: to build at all. timing_cache: it
    measures kernels, and can keep what it measured. runtime_config: contexts are made from one,
    which captures CUDA graphs by itself and keeps compiled kernels in a runtime cache. options:
    the fields of Options it has. with_gpu: those of them that it builds only where a GPU is
    present. compute_capabilities: the GPUs it can name; empty when it builds for the GPU that is
    present. driver_minimum: of the oldest CUDA release its libraries are built with. slow_phase:
    of a build, see watch.Advance.
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
        """What to pip install."""
        return self.distributions[0]


PRODUCTS = {
    "tensorrt-rtx": Product(
        module="tensorrt_rtx",
        distributions=("tensorrt-rtx",),
        versions=("1.7", "2"),
        needs_gpu=False,
        timing_cache=False,  # the calls are there and do nothing
        runtime_config=True,
        # no version_compatible: that takes a lean runtime, which RTX does not ship
        options=frozenset(f.name for f in fields(Options))
        - {"hardware_compatible", "version_compatible"},
        with_gpu=frozenset(("refittable", "strip_weights")),
        compute_capabilities=("75", "80", "86", "89", "120", "121"),
        driver_minimum="580",
        slow_phase="Determining refit engines",
    ),
    "tensorrt": Product(
        module="tensorrt",
        distributions=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        versions=("10.3", "12"),
        needs_gpu=True,
        timing_cache=True,
        runtime_config=False,
        options=frozenset(f.name for f in fields(Options)) - {"compute_capabilities"},
        with_gpu=frozenset(),
        compute_capabilities=(),
        driver_minimum="525",
    ),
}


def version(product: str = "tensorrt-rtx") -> str | None:
    """The installed version, or None; imports nothing."""
    for distribution in PRODUCTS[product].distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def imported(product: str) -> Any:
    """The product's module. Raises MachineError when it is missing or of another version."""
    row = PRODUCTS[product]
    install = f'pip install "{row.distribution}>={row.versions[0]},<{row.versions[1]}"'
    try:
        module = importlib.import_module(row.module)
    except (ImportError, OSError) as e:
        raise MachineError(
            f"{row.module} cannot be imported ({e})",
            where=f"target {product}",
            fix=f"{install}, or on_missing: defer to go on without it.",
        ) from None
    installed = str(module.__version__)
    if not _numbers(row.versions[0]) <= _numbers(installed) < _numbers(row.versions[1]):
        raise MachineError(
            f"{row.module} {installed} is installed",
            where=f"target {product}",
            accepted=f"{row.versions[0]} and later, before {row.versions[1]}",
            fix=install,
        )
    return module


def refuse_options(product: str, options: Options) -> None:
    """Raise BuildError, its `where` the option, for the first option or GPU that `product` does not
    have, saying which product does."""
    row = PRODUCTS[product]
    for name in options.chosen():
        if name not in row.options:
            others = [p for p, r in PRODUCTS.items() if name in r.options]
            raise BuildError(
                f"target {product} has no such option",
                where=name,
                fix=f"Remove it, or use a target that has it: {', '.join(others)}.",
            )
    unknown = [c for c in options.compute_capabilities if c not in row.compute_capabilities]
    if unknown:
        raise BuildError(
            f"compute capability {', '.join(unknown)} was asked for of {product}",
            where="compute_capabilities",
            accepted=", ".join(row.compute_capabilities),
        )


def _numbers(text: str) -> tuple[int, ...]:
    """ "10.13.0rc1" -> (10, 13)."""
    numbers = []
    for part in text.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
