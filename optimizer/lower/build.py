"""Build or open the lowered model with the target's runtime, and inspect the result.

Calls the target's build (targets/__init__.py); a target without one runs as lowered. Writes
model.engine for a runtime with engines, and engine.json:
    runtime, device   of the target
    deferred          true where nothing was built, with the reason in `why`
    engine            "model.engine" | null (the ONNX model runs)
    fit               requirements on a machine that loads it; harness/bundle/fit.py reads them
    inspected         {eligible, fused, wider: [module], known: [...], unknown: [...], ...}, and
                      why_wider, {module: why}, where the runtime reports it
    fallbacks         [module, ...] in higher precision, accepted by allow_precision_fallback
    placed            ONNX Runtime on a GPU only: {provider: nodes it runs}
    network           TensorRT only: I/O, profiles, layers and types of the network definition
    timing_cache      "timing.cache" | null: measurements of the builder, for later builds
The same input gives the same bytes, except for model.engine, timing.cache and inspected.bytes:
TensorRT does not build reproducibly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.foundation.errors import GateError, MachineError, OptimizeError, RecipeError
from optimizer.foundation.progress import say
from optimizer.foundation.references import resolve
from optimizer.harness import errors as harness
from optimizer.harness.runtimes import table as runtimes
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.recipe.schema import TargetSection
from optimizer.store import Estimate, Shapes, Stage, lowered_bytes, package_version

NOT_BUILT: dict[str, Any] = {"deferred": False, "why": "", "engine": None, "inspected": None}


def run(section: TargetSection, model: Path, *, out: Path) -> None:
    """Build for the target of `section` from `model`, the lower stage's folder, or open it with the
    runtime.

    Raises MachineError when this machine cannot build for the target (unless on_missing: defer),
    RecipeError when the builder does not take the model, GateError naming the modules that run
    in higher precision than the recipe says (unless allow_precision_fallback).
    """
    target = targets.look_up(section.runtime)
    fit: dict[str, Any] = resolve(target.fit)(section) if target.fit else {}
    document: dict[str, Any] = dict(NOT_BUILT)
    try:
        if target.build:
            with _translated():
                document |= resolve(target.build)(section, model, out)
    except MachineError as e:
        if section.on_missing != "defer":
            raise
        say(f"build: deferred (on_missing: defer): {e}")
        document |= {"deferred": True, "why": str(e)}
    fallbacks = (document["inspected"] or {}).get("wider", [])
    if fallbacks and not section.allow_precision_fallback:
        raise GateError(
            f"{len(fallbacks)} parts run in higher precision than the recipe says, among "
            f"{document['inspected']['eligible']} quantized modules and other operators: "
            f"{', '.join(fallbacks[:6])}{' ...' if len(fallbacks) > 6 else ''}",
            where=f"target {section.runtime}",
            fix="List them in quantize.keep_float, or accept it with "
            "allow_precision_fallback: true.",
        )
    document |= {
        "runtime": section.runtime,
        "device": section.device,
        "fit": {**fit, **document.get("fit", {})},
        "fallbacks": fallbacks,
    }
    text = json.dumps(document, indent=1, sort_keys=True)
    (out / "engine.json").write_text(text, encoding="utf-8")


@contextmanager
def _translated() -> Iterator[None]:
    """Inside, convert errors of the harness's engine builder: BuildError to RecipeError, the
    harness's MachineError to the toolchain's, others to OptimizeError."""
    kinds: dict[type[harness.HarnessError], type[OptimizeError]] = {
        harness.MachineError: MachineError,
        harness.BuildError: RecipeError,
    }
    try:
        yield
    except harness.HarnessError as e:
        kind = next(
            (ours for theirs, ours in kinds.items() if isinstance(e, theirs)), OptimizeError
        )
        raise kind(e.problem, where=e.where, accepted=e.accepted, fix=e.fix) from e


def files(section: TargetSection) -> Mapping[str, str]:
    """Return {name: version or digest} of everything that the build stage's key depends on besides
    the lowered model: the builder's code, its packages, and GPU and processor where the section
    depends on them."""
    target = targets.look_up(section.runtime)
    provider = runtimes.look_up(section.runtime).required.get(section.runs_on, ())
    names = {*target.distributions, *(name for group in provider for name in group)}
    versions = {f"version of {name}": str(package_version(name)) for name in sorted(names)}
    gpu = {"gpu": str(describe_machine().gpu)} if section.depends_on_gpu else {}
    here = describe_machine() if section.depends_on_processor else None
    processor = {} if here is None else {"processor": f"{here.cpu} {' '.join(here.cpu_features)}"}
    return {**target.code("fit", "build"), **versions, **gpu, **processor}


def estimate(section: TargetSection, shapes: Shapes) -> Estimate:
    """Estimate memory of the build stage from the copies of the model in the target's builder: of
    the float model for an engine, else of the lowered file."""
    target = targets.look_up(section.runtime)
    cost, width = target.cost, 4 if section.float_type == "fp32" else 2
    floats = width * sum(map(prod, shapes.values()))
    size = floats if target.engine_files else lowered_bytes(shapes, width)
    return Estimate(
        memory=cost.memory + round(cost.copies * size),
        disk=size if target.engine_files else 16 << 10,
        seconds=cost.seconds + size / cost.rate,
    )


STAGE = Stage("build", 1, run, files=files, estimate=estimate)
