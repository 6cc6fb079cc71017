"""build: open or build the lowered model with the target's own runtime, and say what it made.

Writes engine.json, and model.engine for a runtime that has engines of its own:
    runtime, device   of the target
    deferred          true: nothing was built, and `why` says so
    engine            "model.engine" | null (the ONNX model is what runs)
    fit               what a machine must have to load it; harness/fit.py reads it
    inspected         {eligible, fused, wider: [module], known: [...], unknown: [...], ...}
    fallbacks         [module, ...] run wider than asked, accepted by allow_precision_fallback
    placed            ONNX Runtime on a GPU only: {provider: nodes it runs}
    network           TensorRT only: I/O, profiles, layers and types of the network definition
    timing_cache      "timing.cache" | null: what the builder measured, for builds to come
The same input gives the same bytes, except for model.engine, timing.cache and what follows from
them (inspected.bytes): TensorRT does not build reproducibly.
"""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from optimizer.errors import GateError, MachineError, OptimizeError, RecipeError
from optimizer.harness import errors as harness
from optimizer.harness.engines import spans
from optimizer.harness.machine import this_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.trt import builder, inspect
from optimizer.harness.runtimes.trt.cuda import first_device
from optimizer.harness.runtimes.trt.products import PRODUCTS
from optimizer.harness.runtimes.trt.watch import PARTS
from optimizer.progress import meter, say
from optimizer.recipe.schema import OnnxRuntimeTarget, TensorRTTarget
from optimizer.store import Estimate, Shapes, Stage
from optimizer.targets import options

ONNXRUNTIME_MINIMUM = "1.26"
ENGINE = "model.engine"
TIMING_CACHE = "timing.cache"

Target = OnnxRuntimeTarget | TensorRTTarget


def run(target: Target, model: Path, *, out: Path) -> None:
    """model: the lower stage's folder.

    Raises MachineError when this machine cannot build for the target (unless on_missing: defer),
    RecipeError when the builder does not take the model, GateError naming the modules that run
    wider than the recipe asks (unless allow_precision_fallback).
    """
    fit = _fit(target)
    document: dict[str, Any]
    try:
        with _translated():
            if isinstance(target, OnnxRuntimeTarget):
                document = _onnxruntime(target, model)
            else:
                document = _tensorrt(target, model, out / ENGINE)
                fit["runtime_version"] = document["network"]["version"]
                fit["compute_capabilities"] = document["network"]["compute_capabilities"]
                fit |= _built_on(target)
    except MachineError as e:
        if target.on_missing != "defer":
            raise
        say(f"build: not built here, as on_missing: defer allows: {e}")
        document = {"deferred": True, "why": str(e), "engine": None, "inspected": None}
    fallbacks = (document["inspected"] or {}).get("wider", [])
    if fallbacks and not target.allow_precision_fallback:
        raise GateError(
            f"{len(fallbacks)} parts run wider than asked, of "
            f"{document['inspected']['eligible']} quantized modules and what is beside them: "
            f"{', '.join(fallbacks[:6])}{' ...' if len(fallbacks) > 6 else ''}",
            where=f"target {target.runtime}",
            fix="List them in quantize.keep_float, or accept it with "
            "allow_precision_fallback: true.",
        )
    document |= {
        "runtime": target.runtime,
        "device": target.device,
        "fit": fit,
        "fallbacks": fallbacks,
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    (out / "engine.json").write_text(text, encoding="utf-8")


def _fit(target: Target) -> dict[str, Any]:
    """What holds before anything is built; see harness/fit.py for how it is read."""
    if isinstance(target, OnnxRuntimeTarget):
        return {"runtime_minimum": ONNXRUNTIME_MINIMUM}
    row = PRODUCTS[target.runtime]
    asked = asdict(options(target))
    profiles = _profiles(target)
    return {
        **{name: value for name, value in asked.items() if name in row.options},
        "runtime_minimum": row.versions[0],
        "driver_minimum": row.driver_minimum,
        "os": platform.system().lower(),
        "architecture": platform.machine().lower(),
        "shapes": profiles[0] if len(profiles) == 1 else profiles,
    }


def _profiles(target: TensorRTTarget) -> list[dict[str, Any]]:
    """[min, opt, max] by axis, of each."""
    return [p.model_dump(mode="json", exclude={"buckets"}) for p in target.shapes.profiles()]


def _built_on(target: TensorRTTarget) -> dict[str, str]:
    """The GPU whose model binds the engine, where the product builds for the one that is here: as
    CUDA names it, for it is CUDA's first device that was built on."""
    if not PRODUCTS[target.runtime].needs_gpu:
        return {}
    asked, gpu = first_device(), this_machine().gpu
    name = asked[0] if asked is not None else gpu.name if gpu is not None else None
    return {"gpu": name} if name is not None else {}


def _onnxruntime(target: OnnxRuntimeTarget, model: Path) -> dict[str, Any]:
    """Open the model, and read from the graph as the runtime optimized it what is fused."""
    from optimizer.lower.inspect_ort import inspect

    with tempfile.TemporaryDirectory() as folder:
        optimized = Path(folder) / "optimized.onnx"
        with OrtRunner(
            model / "model.onnx", device=target.runs_on, threads=target.threads
        ) as runner:
            runner.save_optimized(optimized)
            placed, stayed = runner.placed, runner.on_cpu
        inspected = on_cpu_is_wider(inspect(model, optimized), stayed)
    document = {"deferred": False, "why": "", "engine": None, "inspected": inspected}
    return document | ({"placed": placed} if target.device != "cpu" else {})


def on_cpu_is_wider(inspected: dict[str, Any], stayed: Sequence[str]) -> dict[str, Any]:
    """The same, with the computing nodes that a GPU's provider left to the CPU among `wider`."""
    left = [f"{node} on the CPU" for node in stayed]
    return {**inspected, "wider": [*inspected["wider"], *left]}


def _tensorrt(target: TensorRTTarget, model: Path, engine: Path) -> dict[str, Any]:
    lowering = json.loads((model / "lowering.json").read_text(encoding="utf-8"))["modules"]
    cache = engine.with_name(TIMING_CACHE)
    with meter("build: engine", PARTS) as tell:
        network = builder.build(
            model / "model.onnx",
            engine,
            shapes=spans(_profiles(target)),
            product=target.runtime,
            options=options(target),
            modules={name: entry["codes"] for name, entry in lowering.items()},
            timing_cache=cache,
            progress=lambda _phase, done, _of: tell(done),
        )
    return {
        "deferred": False,
        "why": "",
        "engine": engine.name,
        "inspected": inspect_network(lowering, network),
        "network": network,
        "timing_cache": cache.name if cache.is_file() else None,
    }


def inspect_network(lowering: dict[str, Any], network: dict[str, Any]) -> dict[str, Any]:
    """What a network definition and the engine tell of the quantized modules.

    fused counts modules that reach the builder as codes, a dequantization and a product, with
    the activation coded as asked, and that the engine, where it could be opened, does not run
    wider. An engine too large for its codes to be codes makes all wider.
    """
    found, kernels = network["modules"], network.get("kernels")
    wider = {
        name: "not in the network as codes"
        for name, asked in lowering.items()
        if name not in found
        or (asked["activation"] != "float" and found[name]["activation"] is None)
    }
    if kernels is not None:
        wider |= inspect.wider(lowering, kernels)
    if network["kept_packed"] is False:
        wider = dict.fromkeys(lowering, "the engine is too large for its codes to be codes")
    known, unknown = _told(lowering, network)
    return {
        "eligible": len(lowering),
        "fused": len(lowering) - len(wider),
        "wider": sorted(wider),
        "why_wider": dict(sorted(wider.items())),
        "runs_in": kernels,
        "bytes": network["bytes"],
        "known": known,
        "unknown": unknown,
    }


def _told(lowering: dict[str, Any], network: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What of an engine is known, and what is not."""
    known = [
        "the engine's version, and the GPUs it was built for",
        "the network definition: each module's codes, their type and the product they enter",
    ]
    unknown = []
    kept = network["kept_packed"]
    if kept is None:
        unknown.append("whether weights are kept as codes: too small a part of the engine to tell")
    else:
        verdict = "kept as codes" if kept else "widened"
        known.append(f"its size: the quantized weights are {verdict}")
    kernels = network.get("kernels")
    if kernels is None:
        unknown.append(
            "the kernels chosen, and the precision they compute in: an engine opens only on its GPU"
        )
        return known, unknown
    known.append("the engine's own layers: which kernel each module runs in, and its types")
    untold = inspect.untold(lowering, kernels)
    if untold:
        unknown.append(f"what these compute in, which the engine does not say: {', '.join(untold)}")
    return known, unknown


@contextmanager
def _translated() -> Iterator[None]:
    """The harness knows nothing of recipes; its errors become the pipeline's."""
    kinds: dict[type[harness.HarnessError], type[OptimizeError]] = {
        harness.MachineError: MachineError,
        harness.BuildError: RecipeError,
    }
    try:
        yield
    except harness.HarnessError as e:
        kind = kinds.get(type(e), OptimizeError)
        raise kind(e.found, where=e.where, accepted=e.accepted, fix=e.fix) from e


def files(target: Target) -> Mapping[str, str]:
    """The GPU, where what is built, or that nothing is, depends on it."""
    if isinstance(target, TensorRTTarget):
        row = PRODUCTS[target.runtime]
        looks = row.needs_gpu or bool(row.with_gpu & set(options(target).asked()))
    else:
        looks = target.device != "cpu"
    return {"gpu": str(this_machine().gpu)} if looks else {}


def estimate(target: Target, shapes: Shapes) -> Estimate:
    """ONNX Runtime opens the model once; TensorRT holds it about three times and writes it."""
    size = (2 if target.export.float == "fp16" else 4) * sum(map(prod, shapes.values()))
    if target.runtime == "onnxruntime":
        return Estimate(memory=(250 << 20) + 2 * size, disk=16 << 10, seconds=1.0 + size / 400e6)
    return Estimate(memory=(600 << 20) + 3 * size, disk=size, seconds=4.0 + size / 20e6)


STAGE = Stage(
    "build",
    1,
    run,
    packages=(
        "onnxruntime",
        "onnxruntime-gpu",
        *(name for row in PRODUCTS.values() for name in row.distributions),
    ),
    files=files,
    estimate=estimate,
)
