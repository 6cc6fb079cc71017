"""What a target is: the record whose rows are targets.py's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.foundation.references import record_code
from optimizer.foundation.source_digest import source_digest
from optimizer.recipe.targets import TargetSection

GROUP = "optimizer.targets"
GROUPS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Accepts:
    """What a lowering can express.

    weight_zero_point: asymmetric weights. dynamic_activations: granularity: token. group_sizes,
    int4_granularities: what is kept packed. codes_looked_up: takes rows of an int8 table, so that
    an embedding stays quantized. full_range: takes integers -8..7 with scales of either sign.
    no_integer_kernels: {device: why} of those where quantized activations would run in float.
    float_products: what becomes of int4 weights in groups beside static ranges, where they are
    taken: products in float; "": they are not.
    zeros_alone: takes pruned weights that stay float.
    integer_attention: runs the products of an encoder's attention in integers.
    sparse_kernels: the patterns for which it has kernels that skip zeros.
    """

    weight_zero_point: bool = True
    dynamic_activations: bool = True
    group_sizes: tuple[int, ...] = GROUPS
    int4_granularities: tuple[str, ...] = ("group",)
    codes_looked_up: bool = True
    full_range: bool = False
    no_integer_kernels: Mapping[str, str] = field(default_factory=dict)
    float_products: str = ""
    zeros_alone: bool = True
    integer_attention: bool = False
    sparse_kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class BuildCost:
    """What a build is predicted to need: memory of its own and `copies` of the float weights, in
    bytes; seconds to start, and bytes of float weights a second."""

    memory: int = 250 << 20
    copies: int = 1
    seconds: float = 1.0
    rate: float = 400e6


@dataclass(frozen=True)
class Kernels:
    """How a runtime's fused kernels compute, where the ledger's bounds follow from it.

    reciprocal: a static quantizer multiplies by 1 / step and adds, as OpenVINO's FakeQuantize, and
    does not divide (validate/ledger/pieces/quantizer.py). open: (run) -> what opens a piece of the
    graph in them; "": on a CPU ONNX Runtime's are judged. behind_quantizers: integers are
    multiplied as such only behind an operator that makes them, so a product is run with its
    quantizer.
    """

    reciprocal: bool = False
    behind_quantizers: bool = False
    open: str = ""


@dataclass(frozen=True)
class Packed:
    """A target's part of a bundle, to which `Target.package` adds. name: the product's; bundle: the
    folder; entry: of the engine in the manifest; source, lowered, built: the folders of load, lower
    and build; report: what validate says of it."""

    name: str
    bundle: Path
    entry: Mapping[str, Any]
    source: Path
    lowered: Path
    built: Path
    report: Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One runtime. Functions are named "package.module:function" and imported where they are
    called, so that the table imports neither torch nor onnx; their code is part of the keys of the
    steps that call them.

    name      what `runtime:` says; section: the class of its section in a recipe
    accepts   what its lowering can express; check: (recipe, section, its path in the recipe), what
              else must hold of a recipe; check_model: (the model's config with transformers'
              defaults, the section's path), what must hold of a model
    lower     (section, source, state, graph, out): what the lower stage writes; estimate: (section,
              shapes) -> what that needs; files: globs of what a bundle needs of it, the model first
    fit       (section) -> what a machine must have to run it, see harness/bundle/fit.py; "":
              nothing
    build     (section, model, out) -> what engine.json says besides, see lower/build.py; "": the
              model is what runs. engine_files: it has files of its own, which fit some machines
    open      (run, device) -> what answers for the target in validate, with infer and close; "":
              nothing here runs it, and no quality is measured
    answered_by  what the report says beside the quality, where what `open` gives is not what serves
              the target; "" where it is
    hops      (run) -> the ledger's hops; "": what is lowered is not judged
    kernels   of its runtime
    floats    (section) -> {name in reports: section} of what the same runtime offers in float on
              this machine, the first as it is asked for; "": one, "<runtime>-float"
    judged_by    distributions besides our dependencies that `open` and `hops` import
    untimed   why validate does not time it, "" where it does
    package   (Packed): adds to a bundle what the model needs besides
    distributions  whose version can change what is built; extras: {provider or device: the extra
              of this distribution that installs it}
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
        """The files of a lowered model that a bundle needs, the model first. lowered: the lower
        stage's folder."""
        return list(dict.fromkeys(p for glob in self.files for p in sorted(lowered.glob(glob))))

    def code(self, *parts: str) -> dict[str, str]:
        """{module: digest of its source and what it imports} of the functions named by `parts`."""
        references = [str(getattr(self, part)) for part in parts]
        modules = sorted({r.partition(":")[0] for r in references if r})
        digests = {f"code of {m}": source_digest(m, own=True) for m in modules}
        return digests | record_code(GROUP, self.name)
