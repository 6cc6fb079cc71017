"""Types of the records in the table of targets (targets/__init__.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.foundation.references import record_code
from optimizer.foundation.source_digest import digest_sources
from optimizer.recipe.targets import GROUP, TargetSection

GROUPS = (16, 32, 64, 128, 256)  # default of Accepts.group_sizes


@dataclass(frozen=True)
class Accepts:
    """Features that the lowering to a runtime accepts.

    weight_zero_point: asymmetric weights
    dynamic_activations: activations with granularity: token
    group_sizes: group sizes of weights that stay packed
    int4_granularities: granularities of weights below 8 bits that stay packed
    integer_lookup: embeddings that stay quantized (row lookup in an int8 table)
    full_range: integers -8..7 with scales of either sign
    no_integer_kernels: {device: reason} for devices on which quantized activations would run in
        float
    float_products: description of the float products that int4 groups with static ranges run as;
        "": such a recipe is refused
    zeros_alone: pruned weights that stay float
    integer_attention: integer products in an encoder's attention
    sparse_kernels: sparsity patterns for which kernels skip zeros
    float8: FP8 and FP4 weights, with activations in float or of the same type
    float8_cache: a KV cache in FP8 with calibrated scales
    adapters_on: devices on which each request may choose an adapter of a decoder
    """

    weight_zero_point: bool = True
    dynamic_activations: bool = True
    group_sizes: tuple[int, ...] = GROUPS
    int4_granularities: tuple[str, ...] = ("group",)
    integer_lookup: bool = True
    full_range: bool = False
    no_integer_kernels: Mapping[str, str] = field(default_factory=dict)
    float_products: str = ""
    zeros_alone: bool = True
    integer_attention: bool = False
    sparse_kernels: tuple[str, ...] = ()
    float8: bool = False
    float8_cache: bool = False
    adapters_on: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildCost:
    """Figures from which the memory and time of a build are predicted.

    memory: bytes besides copies of the weights
    copies: number of copies in memory of the lowered file or, for an engine, of the float weights
    seconds: start-up time
    rate: bytes of float weights processed per second
    """

    memory: int = 250 << 20
    copies: float = 1
    seconds: float = 1.0
    rate: float = 400e6


@dataclass(frozen=True)
class Kernels:
    """Arithmetic of a runtime's fused kernels, from which bounds of the ledger follow.

    reciprocal: True where a static quantizer multiplies by 1 / step, as OpenVINO's FakeQuantize
        does, instead of dividing (validate/ledger/pieces/quantizer.py)
    behind_quantizers: True where integer products need their quantizer in the same graph, so that
        both are run together
    open: (run) -> function that opens a piece of the graph in these kernels; "": ONNX Runtime on a
        CPU
    """

    reciprocal: bool = False
    behind_quantizers: bool = False
    open: str = ""


@dataclass(frozen=True)
class Packed:
    """Arguments of `Target.package`: one target's part of a bundle.

    name: name of the product
    bundle: folder of the bundle
    entry: the target's entry in the manifest
    source, lowered, built: folders of stages load, lower and build
    report: report of validate
    """

    name: str
    bundle: Path
    entry: Mapping[str, Any]
    source: Path
    lowered: Path
    built: Path
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """Record of one runtime. Functions are references "package.module:function", imported where
    they are called, so that the table imports neither torch nor onnx; their code is part of the
    keys of the steps that call them.

    name: value of `runtime:`
    section: class of its section in a recipe
    accepts: capabilities of its lowering
    lower: (section, source, state, graph, out), work of the lower stage
    estimate: (section, shapes) -> needs of `lower`
    files: globs of the lowered files that a bundle needs, the model first
    check: (recipe, section, path of the section), further checks of a recipe
    check_model: (config with transformers' defaults, path of the section, recipe, section), checks
                 of a model
    fit: (section) -> requirements on a machine that runs it (harness/bundle/fit.py); "": none
    build: (section, model, out) -> fields of engine.json (lower/build.py); "": the lowered model
           itself runs
    engine_files: True where `build` writes files that fit only some machines
    open: (run, device) -> runner with infer and close, for validate; "": nothing here runs it, and
          no quality is measured
    answered_by: note of the report on which program answered, where the runner of `open` is not the
                 program that serves the target
    hops: (run) -> hops of the ledger; "": the lowered model is not judged
    kernels: arithmetic of its runtime
    floats: (section) -> {name in reports: section} of the runtime's float baselines on this
            machine, the requested one first; "": only "<runtime>-float"
    judged_by: distributions that `open` and `hops` import, besides our dependencies
    untimed: reason why validate does not time it; "": it does
    package: (Packed), adds further files to a bundle
    distributions: distributions whose version can change what is built
    extras: {provider or device: extra of this distribution that installs it}
    cost: predicted needs of `build`
    """

    name: str
    section: type[TargetSection]
    accepts: Accepts
    lower: str
    estimate: str = ""
    files: tuple[str, ...] = ("model.onnx", "model.onnx.*")
    check: str = ""
    check_model: str = ""
    fit: str = ""
    build: str = ""
    engine_files: bool = False
    open: str = ""
    answered_by: str = ""
    hops: str = ""
    kernels: Kernels = Kernels()
    floats: str = ""
    judged_by: tuple[str, ...] = ()
    untimed: str = ""
    package: str = ""
    distributions: tuple[str, ...] = ()
    extras: Mapping[str, str] = field(default_factory=dict)
    cost: BuildCost = BuildCost()

    def model_files(self, lowered: Path) -> list[Path]:
        """Return the paths of the files that a bundle needs, the model first.

        lowered: folder of stage lower
        """
        return list(dict.fromkeys(p for glob in self.files for p in sorted(lowered.glob(glob))))

    def code(self, *parts: str) -> dict[str, str]:
        """Return, for the key of a step, {"code of MODULE": digest} of the modules whose functions
        are named in the fields `parts`."""
        references = [str(getattr(self, part)) for part in parts]
        modules = sorted({r.partition(":")[0] for r in references if r})
        digests = {f"code of {m}": digest_sources(m, own=True) for m in modules}
        return digests | record_code(GROUP, self.name)
