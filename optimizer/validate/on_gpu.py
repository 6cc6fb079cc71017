"""What answers for a target: the built engine itself where it runs, by the same table that serves a
bundle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from optimizer import targets
from optimizer.foundation.references import resolve
from optimizer.harness import tasks
from optimizer.harness.bundle.engines import Workshop
from optimizer.harness.bundle.fit import verdicts
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.runner import Runner
from optimizer.targets.missing_packages import not_judged
from optimizer.validate import served
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces import pieces
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.run_artifacts import RunArtifacts


def not_here(m: RunArtifacts) -> str:
    """Why this machine cannot run the built engine, or "". A runtime without engine files runs the
    model itself."""
    document, target = m.inspected, m.section.target
    if document.get("deferred"):
        return f"the engine was not built here: {document.get('why')}"
    if not targets.of(target.runtime).engine_files:
        return ""
    (row,) = verdicts({"engines": [_entry(m)]}, this_machine())
    return "" if row.how == "load" else f"the {target.runtime} engine is not run here: {row.why}"


def untimed(m: RunArtifacts) -> str:
    """Why a report has no times of an engine that runs here, or ""."""
    return targets.of(m.section.target.runtime).untimed


def unanswered(m: RunArtifacts) -> str:
    """Why nothing here answers for the target, so that its quality is not judged, or ""."""
    runtime = m.section.target.runtime
    if targets.of(runtime).open:
        return not_judged(m.section.target)
    return (
        f"nothing here runs what is lowered for {runtime}, so that no quality is measured; give "
        "its record in optimizer.targets an `open`"
    )


def candidate(m: RunArtifacts, device: str) -> Any:
    """What answers for the target, opened as its record says (targets/__init__.py: open), on
    `device` where that is the lowered model. Has infer and close."""
    return resolve(targets.of(m.section.target.runtime).open)(m, device)


def lowered(m: RunArtifacts, device: str) -> OrtRunner:
    """The lowered model in ONNX Runtime on `device`."""
    kind = pieces.Graph if tasks.of(m.contract).generates else OrtRunner
    threads = m.section.target.intra_op_threads
    return kind(m.model / "model.onnx", device=device, threads=threads)


def engine(m: RunArtifacts, device: str) -> Any:
    """The engine, where it runs, and otherwise the lowered model in ONNX Runtime on `device`."""
    return lowered(m, device) if not_here(m) else opened(m)


def opened(m: RunArtifacts, threads: int | None = None, *, exact_cache: bool = False) -> Runner:
    """The engine as a bundle opens it; no compiled kernel of another run is used or kept. threads:
    the target's when None. exact_cache: keys and values are not rounded, whatever the target says.
    Raises harness.errors.MachineError, BundleError."""
    shop = Workshop(m.engine, {"files": {}}, this_machine(), None, contract=m.contract)
    own = m.section.target.intra_op_threads
    entry = _entry(m)
    if exact_cache and m.section.target.rounds_cache:
        entry["fit"] = {**entry["fit"], "kv_cache": "float"}
    return shop.open(entry, "load", own if threads is None else threads)


def kernels(m: RunArtifacts) -> pieces.Opener:
    """What opens a piece of the lowered graph in the built engine's kernels on a CPU."""
    own = targets.of(m.section.target.runtime).kernels
    if not own.open:
        return pieces.FUSED
    return pieces.Opener(resolve(own.open)(m), own.behind_quantizers)


def fused(m: RunArtifacts, traces: Sequence[Trace]) -> list[dict[str, Array]]:
    """What these kernels answer, whole."""
    if targets.of(m.section.target.runtime).kernels.open:
        return outputs(m, traces)
    return pieces.run_graph(m.model / "model.onnx", traces, m.compared, pieces.FUSED)


def decoder(m: RunArtifacts, *, fuse: bool) -> Any:
    """A decoder on one thread: as a bundle's harness runs it but for a cache that is rounded, which
    has a gate of its own; in ONNX Runtime where no other runtime here does; without `fuse` in ONNX
    Runtime, operator by operator as it is written."""
    if fuse and targets.of(m.section.target.runtime).kernels.open and not not_here(m):
        return opened(m, threads=1, exact_cache=True)
    return pieces.Graph(m.model / "model.onnx", threads=1, fuse=fuse)


def served_model(m: RunArtifacts) -> Any:
    """The lowered model as a bundle's harness runs it: in ONNX Runtime where no other runtime here
    does."""
    if targets.of(m.section.target.runtime).kernels.open and not not_here(m):
        return opened(m)
    return OrtRunner(m.model / "model.onnx", threads=1)


def outputs(m: RunArtifacts, traces: Sequence[Trace], runner: Any = None) -> list[dict[str, Array]]:
    """What the engine answers to everything the ledger asks of graphs. runner: the engine, opened
    here when None."""
    results: list[dict[str, Array]] = []
    runner = runner or candidate(m, m.section.target.runs_on)
    with closing(runner):
        for trace in traces:
            answer = runner.infer(pieces.cast_inputs(runner, dict(trace.batch)))
            results.append({n: np.asarray(answer[n], np.float32) for n in m.compared})
    return results


def proven_again(m: RunArtifacts, device: str) -> bool:
    """True where `candidate` on `device` and `as_proven` answer the same bits: not off the CPU, in
    torch, or in what another distribution's record opens."""
    own = resolve(targets.of(m.section.target.runtime).open) in (lowered, engine)
    return own and device == "cpu"


def as_proven(m: RunArtifacts) -> Runner:
    """The engine, or the lowered model, opened on the CPU as hop `engine` runs it, with the
    target's threads."""
    if targets.of(m.section.target.runtime).kernels.open and not not_here(m):
        return opened(m)
    return pieces.Graph(m.model / "model.onnx", threads=m.section.target.intra_op_threads)


def _entry(m: RunArtifacts) -> dict[str, Any]:
    """The engine as a manifest lists it. Its files are intact: they were made by this run, or the
    store compared their digests before it used them again."""
    document = m.inspected
    return {
        **served.entry(m.section.target, m.model / "model.onnx"),
        "engine": document["engine"],
        "fit": document["fit"],
    }
