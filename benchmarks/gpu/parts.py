"""Parts of suite.py: `python -m benchmarks.gpu.parts JOB` runs one and writes its answer.

job: {"part", "work": folder that all parts share, "answer": file to write, "seconds": time limit,
      "rehearse": tiny models on the CPU, "source": the folder of a checkpoint, or null}
answer: {"status": "running" | "ran" | "failed" | "not run", "why", "result"}, written again after
each result, so that a part that is killed leaves its finished ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import check, memory, models, plan, serving, speed, systems

Result = dict[str, Any]
DECODING = "{batch: [1, 1, 8], sequence: [1, 128, 512], past: [0, 256, 1024]}"
"""Prefill and decode in one profile; the windows of perplexity are 256 to 512 tokens."""


class NotRun(Exception):
    """Part that cannot run here; the message names what is missing."""


class Failed(Exception):
    """Part that ran with a wrong result."""

    def __init__(self, why: str, result: Result) -> None:
        super().__init__(why)
        self.result = result


@dataclass(frozen=True)
class Job:
    """Job of a part.

    kind: "encoder" or "decoder"; of a ledger its recipe, of vllm the scheme, of serve the runtime
    system: system to time, or runtime of a ledger
    variant: "float" or "lowered"
    deadline: time.monotonic() at which the part must have ended
    """

    kind: str
    system: str
    variant: str
    work: Path
    answer: Path
    deadline: float
    rehearse: bool
    source: str | None

    @property
    def prepared(self) -> Result:
        made: Result = json.loads((self.work / f"prepared-{self.kind}.json").read_text())
        return made

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def tell(self, status: str, result: Any = None, why: str = "") -> None:
        """Write the answer again."""
        beside = self.answer.with_suffix(".partial")
        beside.write_text(json.dumps({"status": status, "why": why, "result": result}))
        os.replace(beside, self.answer)


def validity(_: Job) -> Result:
    """Check that TensorRT-RTX runs on this GPU and driver, from the header of a tiny engine."""
    import tensorrt_rtx as trt

    log = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.float32, (1, 8))
    network.mark_output(network.add_activation(x, trt.ActivationType.RELU).get_output(0))
    plan = bytes(builder.build_serialized_network(network, builder.create_builder_config()))
    runtime = trt.Runtime(log)
    said, bits = runtime.get_engine_validity(plan[: runtime.engine_header_size])
    names = trt.EngineInvalidityDiagnostics.__members__
    return {
        "version": trt.__version__,
        "validity": said.name,
        "diagnostics": int(bits),
        "means": [n for n, value in names.items() if int(bits) & int(value)],
    }


def bandwidth(job: Job) -> Result:
    """Measure bytes read and written per second by a copy within the device."""
    import torch

    given = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    taken = torch.empty_like(given)
    times = []
    for _i in range(25):
        torch.cuda.synchronize()
        start = time.perf_counter()
        taken.copy_(given)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    made = {
        "bytes_per_second": 2 * given.numel() / sorted(times[5:])[10],
        "of": "median of 20",
        "l2_bytes": torch.cuda.get_device_properties(0).L2_cache_size,
    }
    (job.work / "bandwidth.json").write_text(json.dumps(made))
    return made


def prepare(job: Job) -> Result:
    """Make the files for the parts that build and time; see models.prepare."""
    made = models.prepare(job.kind, job.work, job.rehearse, job.source)
    (job.work / f"prepared-{job.kind}.json").write_text(json.dumps(made))
    return {k: made[k] for k in ("weights", "shapes", "weight_bytes", "cache_bytes") if k in made}


def build(job: Job) -> Result:
    """Build engines of the float and the quantized graph for this GPU; report their sidecars."""
    from optimizer.harness.bundle.engines import spans
    from optimizer.harness.runtimes.trt.build import builder

    made, prepared = {}, job.prepared
    for variant in ("float", "lowered"):
        start = time.perf_counter()
        known = builder.build(
            Path(prepared[variant]),
            engine_path(job, variant),
            shapes=spans(prepared["shapes"]),
            product=job.system,
            options=builder.BuildOptions(compute_capabilities=named_gpu(job.system)),
            modules=prepared["modules"] if variant == "lowered" else {},
        )
        asked = prepared["asked"] if variant == "lowered" else {}
        made[variant] = {"seconds": time.perf_counter() - start, **told(known, asked)}
        job.tell("running", made)
    return made


def named_gpu(product: str) -> tuple[str, ...]:
    """Name this GPU for a product that builds for named GPUs."""
    from optimizer.harness.bundle.fit_columns import capability
    from optimizer.harness.runtimes.machine import describe_machine
    from optimizer.harness.runtimes.trt.products import PRODUCTS

    gpu = describe_machine().gpu
    if gpu is None or not PRODUCTS[product].compute_capabilities:
        return ()
    return (capability(gpu.compute_capability),)


def told(known: Mapping[str, Any], asked: Mapping[str, Any]) -> Result:
    """Shorten the sidecar of builder.build for a report.

    "kernels", "wider" and "untold" are null where the engine could not be opened.

    asked: modules of lowering.json
    """
    from optimizer.harness.runtimes.trt import inspect

    kept = ("version", "compute_capabilities", "bytes", "kept_packed", "warnings", "kernels")
    kernels = known["kernels"]
    return {
        **{k: known[k] for k in kept},
        "layers": len(known["layers"]),
        "wider": None if kernels is None else inspect.precision_fallbacks(asked, kernels),
        "untold": None if kernels is None else inspect.list_unreported_modules(asked, kernels),
    }


def engine_path(job: Job, variant: str) -> Path:
    return job.work / f"{job.kind}-{variant}-{job.system}.engine"


def timed(job: Job) -> Result:
    """Compare answers, then measure latency and throughput, or tokens per second; see speed."""
    prepared, watch = job.prepared, memory.Watch()
    files = {
        **prepared,
        "engine": str(engine_path(job, job.variant)),
        "onnx": prepared[job.variant],
    }
    judge = check.judge("float" if job.system.startswith("torch") else job.variant, prepared)
    try:
        opened = systems.SYSTEMS[job.kind, job.system](files, job.rehearse)
    except systems.Refused as e:
        raise NotRun(str(e)) from e
    made: Result = {"about": opened.about}

    def done(cells: list[Result]) -> None:
        watch.look()
        made["device_memory"] = {**watch.told(), **opened.after()}
        job.tell("running", {**made, "cells": cells})

    grid = models.TINY_GRID if job.rehearse else models.GRID
    measure = speed.encode if job.kind == "encoder" else speed.decode
    made["cells"] = measure(opened, grid, judge, job.left, done)
    opened.close()
    if job.kind == "decoder":
        made["bound"] = _bound(job, made["cells"])
    wrong = [cell["wrong"] for cell in made["cells"] if "wrong" in cell]
    if wrong:
        raise Failed(wrong[0], made)
    if all("why" in cell for cell in made["cells"]):
        raise Failed("time: not one cell was finished", made)
    return made


def _bound(job: Job, cells: list[Result]) -> Result | str:
    """Add the limit of memory bandwidth to each cell."""
    measured = job.work / "bandwidth.json"
    if not measured.is_file():
        return "not run: the bandwidth was not measured"
    weights, cache = job.prepared["weight_bytes"][job.variant], job.prepared["cache_bytes"]
    speed.bound(cells, weights, cache, json.loads(measured.read_text()))
    return {"weight_bytes": weights, "cache_bytes_per_token": cache}


def ledger(job: Job) -> Result:
    """Run a shipped recipe with a GPU target alone, from checkpoint to ledger and gates."""
    from optimizer.foundation.errors import RecipeError
    from optimizer.pipeline import run
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    path = plan.ROOT / "recipes" / f"{job.kind}.yaml"
    writes = recipe_file.read(path).model.task == "text-generation"
    changed = changes(job.system, writes, job.source)
    try:
        recipe = recipe_file.read(path, changed)
    except RecipeError as e:
        raise NotRun(f"the recipe does not fit {job.system}: {e}") from e
    outcome = run(recipe, Store(job.work / "store", until="validate"))
    report = json.loads((outcome.built[0].report.path / "report.json").read_text())
    return judged(report, changed)


def changes(runtime: str, writes: bool, source: str | None) -> list[str]:
    """List the --set values that reduce a shipped recipe to one GPU target.

    The gate on latency is off: other parts time the engines beside more peers.
    """
    gpu = plan.PRODUCTS.get(runtime)
    options = ", float: fp16" if gpu else ", device: cuda"
    if gpu and (named := named_gpu(runtime)):
        options += f", compute_capabilities: [{', '.join(map(repr, named))}]"
    options += f", shapes: {DECODING}" if gpu and writes else ""
    made = [
        f"targets=[{{runtime: {runtime}{options}}}]",
        "validate.latency.must_beat_float=false",
    ]
    if gpu and writes:
        made.append("quantize.embedding=float")  # this runtime looks up no quantized rows
    if source:
        made.append(f"model.source={source}")
        made += ["model.gguf_file=null"] if writes and not list(Path(source).glob("*.gguf")) else []
    return made


def judged(report: Mapping[str, Any], changed: list[str]) -> Result:
    """Shorten a report.

    Raises Failed for a verdict other than "pass", NotRun where the engine did not run.
    """
    kept = ("target", "verdict", "gates", "ledger", "not_measured", "fallbacks")
    made = {**{k: report[k] for k in kept}, "changes": changed}
    if report["verdict"] != "pass":
        gates = [g for g in report["gates"] if g["verdict"] != "pass"]
        said = "; ".join(f"{g['verdict']}: {g['name']}: {g['message']}" for g in gates)
        raise Failed(said or f"the verdict is {report['verdict']}", made)
    (hop,) = [e for e in report["ledger"] if e["hop"] == "engine"]
    if hop["ok"] is None:
        raise NotRun(f"the engine was not asked: {hop['why']}")
    return made


def vllm(job: Job) -> Result:
    """Time vLLM with a folder of ours."""
    from optimizer.harness.errors import MachineError

    folder, fit = serving.write_folder(job.work, job.kind)
    made: Result = {"fit": fit, **serving.origin(job.work)}
    job.tell("running", made)
    try:
        serving.check_machine(fit)
    except MachineError as e:
        raise NotRun(str(e)) from e
    with serving.start_vllm(folder, fit) as url:
        made["cells"] = serving.measure(url, job.rehearse)
    return made


def serve(job: Job) -> Result:
    """Make a bundle of the decoder, start `optimize serve`, which starts vLLM for a bundle of it,
    and time its answers."""
    from optimizer.load_test.server import run_server
    from optimizer.pipeline import run
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    changed = serving.changes(job.kind, job.rehearse)
    recipe = recipe_file.read(job.work / serving.NAME / "recipe.yaml", changed)
    outcome = run(recipe, Store(job.work / "store"))
    report = json.loads((outcome.built[0].report.path / "report.json").read_text())
    made: Result = {"changes": changed, "gates": report["gates"], "verdict": report["verdict"]}
    if outcome.bundle is None:
        raise Failed(f"no bundle was made: the verdict is {report['verdict']}", made)
    job.tell("running", made)
    options = serving.serve_options(job.kind, job.rehearse)
    with run_server(outcome.bundle.path / "bundle", options) as server:
        made["warmed_up"] = dict(server.warmed_up)
        made["cells"] = serving.measure(server.url, job.rehearse)
    return made


KINDS: dict[str, Callable[[Job], Result]] = {
    "validity": validity,
    "bandwidth": bandwidth,
    "prepare": prepare,
    "build": build,
    "encoder": timed,
    "decoder": timed,
    "vllm": vllm,
    "serve": serve,
    "ledger": ledger,
}


def read(given: Mapping[str, Any]) -> tuple[Callable[[Job], Result], Job]:
    """Find the function of a job by its part, such as "encoder:tensorrt:lowered"."""
    what, *rest = given["part"].split(":")
    words = [what, *rest] if what in ("encoder", "decoder") else rest or [what]
    kind, system, variant = (*words, "", "")[:3]
    return KINDS[what], Job(
        kind,
        system,
        variant or "float",
        Path(given["work"]),
        Path(given["answer"]),
        time.monotonic() + given["seconds"],
        given["rehearse"],
        given["source"],
    )


def main() -> None:
    part, job = read(json.loads(sys.argv[1]))
    try:
        job.tell("ran", part(job))
    except NotRun as e:
        job.tell("not run", why=str(e))
    except Failed as e:
        job.tell("failed", e.result, str(e))


if __name__ == "__main__":
    main()
