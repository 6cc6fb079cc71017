"""Open the runner that stands for a target during validation: the built engine where this machine
can run it, else the lowered ONNX model in ONNX Runtime.

Engines and ONNX files are opened by the table that serves a bundle (harness/bundle/engines.py).
No compiled kernel of another run is used or kept. The functions that open something raise
harness.errors.MachineError and BundleError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.foundation.progress import say
from optimizer.foundation.references import resolve
from optimizer.harness import tasks
from optimizer.harness.bundle.engines import Workshop, padded_sizes
from optimizer.harness.bundle.fit import judge_engines
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.fitted import FittedRunner
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.runner import Runner
from optimizer.recipe.schema import TargetSection
from optimizer.targets.missing_packages import explain_unjudged
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces import pieces
from optimizer.validate.ledger.trace import Trace
from optimizer.validate.run_artifacts import RunArtifacts


def explain_not_run(m: RunArtifacts) -> str:
    """Explain why this machine cannot run the built engine; "" where it can. A runtime without
    engine files runs the lowered model itself."""
    document, target = m.inspected, m.section.target
    if document.get("deferred"):
        return f"the engine was not built here: {document.get('why')}"
    if not targets.look_up(target.runtime).engine_files:
        return ""
    (row,) = judge_engines({"engines": [_engine_entry(m)]}, describe_machine())
    return "" if row.how == "load" else f"the {target.runtime} engine is not run here: {row.why}"


def explain_not_timed(m: RunArtifacts) -> str:
    """Explain why validate does not time the target's runtime; "" where it does."""
    return targets.look_up(m.section.target.runtime).untimed


def measure_files(m: RunArtifacts) -> dict[str, int]:
    """Measure {"float_bytes": bytes of the exported graph, or of the checkpoint's folder without
    one, "candidate_bytes": bytes of the lowered files that a bundle holds}."""
    graph = list(m.reference_graph.glob("model.onnx*"))
    float_files = graph or (m.reference / "checkpoint").iterdir()
    files = targets.look_up(m.section.target.runtime).model_files(m.model)
    return {
        "float_bytes": sum(f.stat().st_size for f in float_files),
        "candidate_bytes": sum(f.stat().st_size for f in files),
    }


def explain_not_answered(m: RunArtifacts) -> str:
    """Explain why the quality of the target cannot be measured here; "" where it can."""
    runtime = m.section.target.runtime
    if targets.look_up(runtime).open:
        return explain_unjudged(m.section.target)
    return (
        f"nothing here runs a model lowered for {runtime}, so no quality is measured; give its "
        "record in optimizer.targets an `open`"
    )


def open_candidate(m: RunArtifacts, device: str) -> Any:
    """Open the runner that the target's record names (targets/__init__.py: open), with the methods
    infer and close.

    device: device of the lowered model, where that is opened
    """
    return resolve(targets.look_up(m.section.target.runtime).open)(m, device)


def open_lowered(m: RunArtifacts, device: str) -> OrtRunner:
    """Open the lowered model in ONNX Runtime on `device`. A decoder whose steps a GPU replays from
    a captured graph keeps its steps in the same buffers."""
    kind = pieces.GraphRunner if tasks.look_up(m.contract).generates else OrtRunner
    threads, fixed = m.section.target.intra_op_threads, _replays_graphs(m)
    runner = kind(m.model / "model.onnx", device=device, threads=threads, fixed=fixed)
    return runner.adapted(m.matrices)


def _replays_graphs(m: RunArtifacts) -> bool:
    fit = describe_engine(m.section.target, m.model / "model.onnx")["fit"]
    return bool(fit.get("cuda_graphs", False))


def open_on_gpu_or_lowered(m: RunArtifacts, device: str) -> Any:
    """Open the model on a GPU as a bundle does, else the lowered model in ONNX Runtime."""
    on_gpu = device != "cpu" and not tasks.look_up(m.contract).generates
    return open_engine(m) if on_gpu else open_lowered(m, device)


def open_engine_or_lowered(m: RunArtifacts, device: str) -> Any:
    """Open the engine where it runs here, else the lowered model in ONNX Runtime on `device`."""
    return open_lowered(m, device) if explain_not_run(m) else open_engine(m)


def open_engine(
    m: RunArtifacts, threads: int | None = None, *, exact_cache: bool = False
) -> Runner:
    """Open the engine with the code that serves a bundle.

    threads: number of threads; None: the target's
    exact_cache: True to keep keys and values unrounded, whatever the target says
    """
    entry = _engine_entry(m)
    if exact_cache and m.section.target.rounds_cache:
        entry["fit"] = {**entry["fit"], "kv_cache": "float"}
    default = m.section.target.intra_op_threads
    return _workshop(m.engine, m.contract).open(
        entry, "load", default if threads is None else threads
    )


def open_onnx(
    section: TargetSection,
    model: Path,
    contract: Contract | None = None,
    threads: int | None = None,
) -> Runner:
    """Open an ONNX file for validation, with the target's runtime, precision and properties.

    model: path of the ONNX file
    threads: number of threads; None: the section's
    """
    chosen = section.intra_op_threads if threads is None else threads
    return _workshop(model.parent, contract).open(describe_engine(section, model), "load", chosen)


def _workshop(folder: Path, contract: Contract | None) -> Workshop:
    return Workshop(folder, {"files": {}}, describe_machine(), None, say, contract=contract)


def describe_engine(section: TargetSection, model: Path) -> dict[str, Any]:
    """Return the entry that a manifest would have for an intact ONNX file."""
    target = targets.look_up(section.runtime)
    return {
        "target": section.name,
        "runtime": section.runtime,
        "device": section.device,
        "provider": section.execution_provider,
        "model": str(model.resolve()),
        "model_files": [],
        "engine": None,
        "deferred": False,
        "fit": resolve(target.fit)(section) if target.fit else {},
    }


def _engine_entry(m: RunArtifacts) -> dict[str, Any]:
    """Describe the built engine as a manifest would, so that validation opens it as a bundle does.
    Its files are intact: this run made them, or the store compared their digests before it used
    them again."""
    document = m.inspected
    return {
        **describe_engine(m.section.target, m.model / "model.onnx"),
        "engine": document["engine"],
        "fit": document["fit"],
    }


def float_baselines(section: TargetSection) -> dict[str, TargetSection]:
    """Return {name in reports: target section} of each float baseline that the runtime offers here:
    the section itself, as "<runtime>-float", unless the runtime lists several."""
    floats = targets.look_up(section.runtime).floats
    sections: dict[str, TargetSection] = (
        resolve(floats)(section) if floats else {f"{section.runtime}-float": section}
    )
    return sections


def make_piece_opener(m: RunArtifacts) -> pieces.Opener:
    """Make the opener that runs pieces of the lowered graph in the built engine's kernels on
    a CPU."""
    kernels = targets.look_up(m.section.target.runtime).kernels
    if not kernels.open:
        return pieces.FUSED
    return pieces.Opener(resolve(kernels.open)(m), kernels.behind_quantizers)


def open_pieces_on_target(m: RunArtifacts) -> Callable[[Path], AbstractContextManager[Runner]]:
    """Return a function that opens a piece of the lowered graph in the target's kernels, on one
    thread. Float parts run in float32, because integers cannot be told from the rounding of a
    coarser type."""
    section = m.section.target
    if section.computes_in != section.float_type:
        section = section.model_copy(update={"float": section.float_type})

    @contextmanager
    def open_piece(model: Path) -> Iterator[Runner]:
        with closing(open_onnx(section, model, threads=1)) as runner:
            yield runner

    return open_piece


def run_fused(m: RunArtifacts, traces: Sequence[Trace]) -> list[dict[str, Array]]:
    """Run the uncut graph in the kernels of make_piece_opener and return {output: array} of each
    trace."""
    if targets.look_up(m.section.target.runtime).kernels.open:
        return run_engine(m, traces)
    opener = pieces.change_opener(pieces.FUSED, m.matrices)
    return m.in_files(pieces.run_graph(m.model / "model.onnx", traces, m.compared, opener))


def run_engine(
    m: RunArtifacts, traces: Sequence[Trace], runner: Any = None
) -> list[dict[str, Array]]:
    """Run the engine and return {output: array} of each trace.

    runner: the open engine; None: it is opened and closed here
    """
    runner = runner or _open_with_every_output(m, m.section.target.runs_on)
    with closing(runner):
        return m.in_files(pieces.run_each(runner, traces, m.compared))


def _open_with_every_output(m: RunArtifacts, device: str) -> Any:
    """Open the candidate with all outputs that the ledger compares. On a GPU a bundle computes the
    answer alone."""
    ours = resolve(targets.look_up(m.section.target.runtime).open)
    if ours is not open_on_gpu_or_lowered:
        return open_candidate(m, device)
    return open_padded(m, device) or open_lowered(m, device)


def open_padded(m: RunArtifacts, device: str) -> Runner | None:
    """Open the lowered model in ONNX Runtime on `device`, with texts or images padded to the sizes
    of the target's engine; None where the engine takes any size. On the CPU the operators run as
    written, so that nothing but the padding differs from the lowered graph."""
    model = m.model / "model.onnx"
    sizes = padded_sizes(describe_engine(m.section.target, model), m.contract)
    if not sizes:
        return None
    runner = OrtRunner(model, device=device, threads=1, fuse=device != "cpu")
    return FittedRunner(runner, m.contract, sizes)


def _engine_runs(m: RunArtifacts) -> bool:
    """Return True if a runtime other than ONNX Runtime runs the target on this machine."""
    return bool(targets.look_up(m.section.target.runtime).kernels.open) and not explain_not_run(m)


def open_decoder(m: RunArtifacts, *, fuse: bool) -> Any:
    """Open a decoder on one thread, as a bundle's harness runs it, but with an unrounded KV cache,
    because a rounded one has its own gate.

    fuse: True for fused kernels; False for ONNX Runtime, operator by operator as written
    """
    if fuse and _engine_runs(m):
        return open_engine(m, threads=1, exact_cache=True)
    model, fixed = m.model / "model.onnx", fuse and _replays_graphs(m)
    graph = pieces.GraphRunner(model, threads=1, fuse=fuse, mapped=not fuse, fixed=fixed)
    return graph.adapted(m.matrices)


def open_served(m: RunArtifacts) -> Any:
    """Open the lowered model as a bundle's harness runs it."""
    if _engine_runs(m):
        return open_engine(m)
    return OrtRunner(m.model / "model.onnx", threads=1)


def open_proven(m: RunArtifacts) -> Runner:
    """Open the engine, or the lowered model, on the CPU as hop `engine` runs it, with the target's
    threads."""
    if _engine_runs(m):
        return open_engine(m)
    threads = m.section.target.intra_op_threads
    return pieces.GraphRunner(m.model / "model.onnx", threads=threads).adapted(m.matrices)


def repeats_proven_bits(m: RunArtifacts, device: str) -> bool:
    """Return True if `open_candidate` on `device` and `open_proven` give the same bits: on the CPU,
    except in torch and in runners of another distribution."""
    ours = resolve(targets.look_up(m.section.target.runtime).open)
    opened = (open_lowered, open_on_gpu_or_lowered, open_engine_or_lowered)
    return ours in opened and device == "cpu"
