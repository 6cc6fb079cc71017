"""Build an engine with a product of the TensorRT family, and inspect its precisions."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from optimizer.foundation.progress import meter
from optimizer.harness.bundle.engines import spans
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.trt import inspect
from optimizer.harness.runtimes.trt.build import builder
from optimizer.harness.runtimes.trt.build.watch import PARTS
from optimizer.harness.runtimes.trt.cuda import first_device
from optimizer.harness.runtimes.trt.products import PRODUCTS, BuildOptions
from optimizer.recipe.schema import TensorRTTarget

ENGINE = "model.engine"
TIMING_CACHE = "timing.cache"
SPARSE_KERNELS = "2:4"


def fit(section: TensorRTTarget) -> dict[str, Any]:
    """Return what a TensorRT engine requires of a machine, as known before the build
    (harness/bundle/fit.py)."""
    row = PRODUCTS[section.runtime]
    options = asdict(section.options)
    profiles = _profiles(section)
    return {
        **{name: value for name, value in options.items() if name in row.options},
        "runtime_minimum": row.versions[0],
        "driver_minimum": row.driver_minimum,
        "os": platform.system().lower(),
        "architecture": platform.machine().lower(),
        "shapes": profiles[0] if len(profiles) == 1 else profiles,
    }


def _profiles(section: TensorRTTarget) -> list[dict[str, Any]]:
    """Return the optimization profiles of a TensorRT build, each {axis: [min, opt, max]}."""
    return [p.model_dump(mode="json", exclude={"buckets"}) for p in section.profiles]


def _built_on(section: TensorRTTarget) -> dict[str, str]:
    """Return {"gpu": CUDA's first device} where a TensorRT engine is bound to the GPU that builds
    it, else {}."""
    if not PRODUCTS[section.runtime].needs_gpu:
        return {}
    device, gpu = first_device(), describe_machine().gpu
    name = device[0] if device is not None else gpu.name if gpu is not None else None
    return {"gpu": name} if name is not None else {}


def build(section: TensorRTTarget, model: Path, out: Path) -> dict[str, Any]:
    """Build the TensorRT engine into `out`, and inspect it. Returns entries of engine.json.

    model: the lower stage's folder
    Raises harness.errors.MachineError where it cannot be built here, BuildError where the builder
    refuses the model.
    """
    engine = out / ENGINE
    document = json.loads((model / "lowering.json").read_text(encoding="utf-8"))
    lowering, options = document["modules"], _options(section, document.get("sparsity", {}))
    cache = engine.with_name(TIMING_CACHE)
    with meter("build: engine", PARTS) as tell:
        network = builder.build(
            model / "model.onnx",
            engine,
            shapes=spans(_profiles(section)),
            product=section.runtime,
            options=options,
            modules={name: entry["codes"] for name, entry in lowering.items()},
            timing_cache=cache,
            progress=lambda _phase, done, _of: tell(done),
        )
    inspected = inspect_network(lowering, network)
    if options.sparse_weights:
        _sparse_kernels(inspected, network["sparse"])
    return {
        "engine": engine.name,
        "inspected": inspected,
        "network": network,
        "timing_cache": cache.name if cache.is_file() else None,
        "fit": {
            "runtime_version": network["version"],
            "compute_capabilities": network["compute_capabilities"],
            "sparse_weights": options.sparse_weights,
            **_built_on(section),
        },
    }


def _options(section: TensorRTTarget, sparsity: dict[str, str]) -> BuildOptions:
    """TensorRT's builder options; the recipe, else a 2:4 in `sparsity`, {module: pattern}, sets
    sparse_weights."""
    if section.sparse_weights is not None:
        return section.options
    return replace(section.options, sparse_weights=SPARSE_KERNELS in sparsity.values())


def _sparse_kernels(inspected: dict[str, Any], messages: list[str]) -> None:
    """Add the messages of TensorRT's builder about kernels for sparse weights to `inspected`."""
    if messages:
        inspected["known"].append(f"kernels for 2:4 sparse weights: {'; '.join(messages)}")
    else:
        inspected["unknown"].append(
            "which layers run in kernels for 2:4 sparse weights: the builder may use them where "
            "they are faster (SPARSE_WEIGHTS), and does not report it"
        )


def inspect_network(lowering: dict[str, Any], network: dict[str, Any]) -> dict[str, Any]:
    """Inspect the quantized modules in TensorRT's network definition and its engine.

    A module counts as fused where the network has its integers, a dequantization and a product,
    with the lowered activation, and an engine that could be opened does not run it in higher
    precision. An engine too large for integer weights runs every module in higher precision.
    """
    in_network, kernels = network["modules"], network.get("kernels")
    fallbacks = {
        name: "not in the network as integers"
        for name, scheme in lowering.items()
        if name not in in_network
        or (scheme["activation"] != "float" and in_network[name]["activation"] is None)
    }
    if kernels is not None:
        fallbacks |= inspect.precision_fallbacks(lowering, kernels)
    if network["kept_packed"] is False:
        fallbacks = dict.fromkeys(
            lowering, "the engine is too large to hold its weights as integers"
        )
    known, unknown = _inspected(lowering, network)
    return {
        "eligible": len(lowering),
        "fused": len(lowering) - len(fallbacks),
        "wider": sorted(fallbacks),
        "why_wider": dict(sorted(fallbacks.items())),
        "runs_in": kernels,
        "bytes": network["bytes"],
        "known": known,
        "unknown": unknown,
    }


def _inspected(lowering: dict[str, Any], network: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Describe what TensorRT's inspection of the built engine shows: return sentences on facts that
    it shows, and on facts that it cannot show."""
    known = [
        "the engine's version, and the GPUs it was built for",
        "the network definition: each module's integers, their type and their product",
    ]
    unknown = []
    packed = network["kept_packed"]
    if packed is None:
        unknown.append("the stored type of the weights, too small a part of the engine's size")
    else:
        verdict = "stored as integers" if packed else "widened"
        known.append(f"its size: the quantized weights are {verdict}")
    kernels = network.get("kernels")
    if kernels is None:
        unknown.append("the selected kernels and their precision: an engine opens only on its GPU")
        return known, unknown
    known.append("the engine's layers: the kernel of each module, and its types")
    untold = inspect.list_unreported_modules(lowering, kernels)
    if untold:
        unknown.append(
            f"the precision of these, which the engine does not report: {', '.join(untold)}"
        )
    return known, unknown
