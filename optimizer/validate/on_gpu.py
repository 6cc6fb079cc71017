"""The built engine itself, asked where its GPU is: by the same table that serves a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from optimizer.harness.engines import Workshop
from optimizer.harness.fit import verdicts
from optimizer.harness.machine import this_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.runtimes.trt.products import PRODUCTS
from optimizer.validate.ledger import pieces
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.materials import Materials


def not_here(m: Materials) -> str:
    """Why this machine cannot run the built engine, or "". ONNX Runtime runs the model itself."""
    document, target = m.inspected, m.section.target
    if document.get("deferred"):
        return f"the engine was not built here: {document.get('why')}"
    if target.runtime not in PRODUCTS:
        return ""
    (row,) = verdicts({"engines": [_entry(m)]}, this_machine())
    return "" if row.how == "load" else f"the {target.runtime} engine is not run here: {row.why}"


def untimed(m: Materials) -> str:
    """Why a report has no times of an engine that runs here, or ""."""
    if m.section.target.runtime not in PRODUCTS:
        return ""
    return "engines are timed beside their peers by benchmarks/gpu_suite.py"


def candidate(m: Materials, device: str) -> Any:
    """What answers for the engine: itself, where it runs, and otherwise the lowered model in ONNX
    Runtime on `device`. Has infer and close."""
    target = m.section.target
    if target.runtime in PRODUCTS and not not_here(m):
        return opened(m)
    threads = getattr(target, "threads", 0)
    kind = pieces.Graph if m.contract.task_record.generates else OrtRunner
    return kind(m.model / "model.onnx", device=device, threads=threads)


def opened(m: Materials) -> Runner:
    """The engine as a bundle opens it; no compiled kernel of another run is used or kept. Raises
    harness.errors.MachineError, BundleError."""
    shop = Workshop(m.engine, {"files": {}}, this_machine(), None, contract=m.contract)
    return shop.open(_entry(m), "load", 0)


def outputs(m: Materials, traces: Sequence[Trace], runner: Any = None) -> list[dict[str, Array]]:
    """What the engine answers to everything the ledger asks of graphs. runner: the engine, opened
    here when None."""
    target = m.section.target
    results: list[dict[str, Array]] = []
    runner = runner or candidate(m, getattr(target, "runs_on", target.device))
    with closing(runner):
        for trace in traces:
            answer = runner.infer(pieces.typed(runner, dict(trace.batch)))
            results.append({n: np.asarray(answer[n], np.float32) for n in m.compared})
    return results


def _entry(m: Materials) -> dict[str, Any]:
    """The engine as a manifest lists it. Its files are intact: they were made by this run, or the
    store compared their digests before it used them again."""
    document, target = m.inspected, m.section.target
    return {
        "target": f"{target.runtime}-{target.device}",
        "runtime": target.runtime,
        "device": target.device,
        "model": str((m.model / "model.onnx").resolve()),
        "model_files": [],
        "engine": document["engine"],
        "deferred": False,
        "fit": document["fit"],
    }
