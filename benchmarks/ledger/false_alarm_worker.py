"""Worker of false_alarms.py: import everything once, and fork a child for each part of a cell.

Imports cost more than many parts do. Torch has not run before the fork, so that each child chooses
its kernels by its environment, which sets the processor to detect. The death of a child does not
affect the others.

A request is a line of JSON on stdin:
    do            "model" (the load stage's folder, at SOURCE), "compress" (compress to build, below
                  FOLDER), or "validate" (the ledger of what is there)
    cell, source, folder
    environment, log, limit    the child's: variables, file for its output, seconds
The answer is a line on stdout: {"status": exit code or -signal, "cpu": seconds, user and system}.

"compress" and "validate" write FOLDER/<part>.json, whole or not at all:
    seconds   {stage: seconds}
    refused   null | {stage, hop, kind, messages}: kind is "verdict" (a stage or a hop refuses),
              "crash" (it raised what it should not), or "unsupported" (the recipe cannot be done)
    ratios    [[hop and piece kind, measured / limit, module or output], ...] (validate only)
    unproven  {hop: why}, of hops that were not run here (validate only)
"""

from __future__ import annotations

import gc
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ledger.false_alarm_cells import TEXTS, Cell, recipe

if TYPE_CHECKING:
    from optimizer.recipe.schema import Export
    from optimizer.validate.ledger.entry import LedgerEntry

NOT_BUILT = "false_alarms.py judges the lowered model: engines are built by `optimize`"

IMPORTED = (
    "accelerate",
    "datasets",
    "benchmarks.ledger.false_alarm_models",
    "onnxruntime",
    "onnxscript.function_libs.torch_lib.ops",
    "optimizer.lower.build",
    "optimizer.compress.stage",
    "optimizer.export.stage",
    "optimizer.data.datasets",
    "optimizer.load.stage",
    "optimizer.lower.stage",
    "optimizer.validate.ledger.ledger",
    "sklearn",
    "torch._functorch.aot_autograd",
    "torch.onnx._internal.exporter._core",
    "transformers.models.bert.modeling_bert",
    "transformers.pipelines",
)
"""Modules that a part imports; each child imports a module that is missing here again."""


def compress(
    cell: Cell, source: Path, folder: Path, graphs: Path
) -> Iterator[tuple[str, Callable[[], None]]]:
    """List (stage, its function) from compress to build, in order. graphs: see exported()."""
    from optimizer.compress.stage import STAGE as compress_
    from optimizer.lower.build import STAGE as build
    from optimizer.lower.stage import STAGE as lower

    made = recipe(cell, str(source))
    target = made.targets[0]
    state, graph, model, engine = (folder / n for n in ("state", "graph", "model", "engine"))
    for made_folder in (state, graph, model, engine):
        made_folder.mkdir(parents=True)
    yield "compress", lambda: compress_.run(made.compression, source, out=state)
    shared = graphs / f"{cell.model}-{cell.seed}-{target.export.float}"
    yield "export", lambda: exported(target.export, source, state, graph, shared)
    yield "lower", lambda: lower.run(target, source, state, graph, out=model)
    if target.runtime == "onnxruntime":
        yield "build", lambda: build.run(target, model, out=engine)
    else:
        document = {"deferred": True, "why": NOT_BUILT, "inspected": None}
        (engine / "engine.json").write_text(json.dumps(document))


def exported(section: Export, source: Path, state: Path, out: Path, shared: Path) -> None:
    """Write the export stage's folder to `out`.

    All states of a model that replace no parameter share one folder: exported once to `shared`, and
    linked.
    """
    from optimizer.export.stage import STAGE
    from optimizer.foundation import state as compressed_state

    if compressed_state.read(state).replaced:
        STAGE.run(section, source, state, out=out)
        return
    if not shared.is_dir():
        shared.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=shared.parent))
        STAGE.run(section, source, state, out=made)
        try:
            made.rename(shared)
        except OSError:  # another cell made it meanwhile
            shutil.rmtree(made)
    shutil.copytree(shared, out, copy_function=os.link, dirs_exist_ok=True)


def entries(cell: Cell, source: Path, folder: Path) -> list[LedgerEntry]:
    """Run the ledger as the validate stage does, with the cell's threads in place of one."""
    import torch

    from optimizer.data.datasets import read_samples
    from optimizer.validate.ledger import ledger
    from optimizer.validate.materials import Materials

    torch.set_num_threads(cell.validate_threads)
    made = recipe(cell, str(source))
    section = made.validation(made.targets[0])
    rows = read_samples(section.validate_.data, 200, cell.seed)
    texts = sorted(dict.fromkeys(r.text for r in rows), key=len)
    chosen = [texts[round(i * (len(texts) - 1) / (TEXTS - 1))] for i in range(TEXTS)]
    folders = (folder / n for n in ("state", "graph", "model", "engine"))
    return ledger.run(Materials(section, source, *folders, texts=chosen))


def ratios(found: Sequence[LedgerEntry]) -> list[tuple[str, float, str]]:
    """List (hop and kind of piece, measured / limit, module or output) of each limit of the ledger.

    The compress hop is left out: its budget is the recipe's.
    """
    made = []
    for entry in found:
        made += [(f"{entry.hop}: {p.piece}", p.ratio, p.module) for p in entry.pieces]
        if entry.spread is not None:
            made += [
                (f"{entry.hop}: outputs", o["measured"] / o["limit"], name)
                for name, o in entry.spread["outputs"].items()
            ]
    return [(kind, _shown(ratio), where) for kind, ratio, where in made]


def _shown(ratio: float) -> float:
    """Replace infinity, which JSON lacks."""
    return float(f"{ratio:.4g}") if math.isfinite(ratio) else 1e30


def refusal(found: Sequence[LedgerEntry]) -> dict[str, Any] | None:
    """Describe the first hop that failed; later hops often fail for the same reason."""
    bad = next((e for e in found if e.ok is False), None)
    if bad is None:
        return None
    crashed = bad.why == "it could not be run"
    return {
        "stage": "validate",
        "hop": bad.hop,
        "kind": "crash" if crashed else "verdict",
        "messages": list(bad.problems[:3]),
        "hops": [e.hop for e in found if e.ok is False],
    }


def refused_by(stage: str, error: Exception) -> dict[str, Any]:
    """Describe the error of a stage that raised."""
    from optimizer.foundation.errors import OptimizeError, RecipeError

    kind = "verdict" if isinstance(error, OptimizeError) else "crash"
    kind = "unsupported" if isinstance(error, RecipeError) else kind
    messages = [f"{type(error).__name__}: {error}"]
    if kind == "crash":
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        messages += [f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames]
    return {"stage": stage, "hop": "", "kind": kind, "messages": messages}


def part(name: str, cell: Cell, source: Path, folder: Path, graphs: Path) -> dict[str, Any]:
    """Run a part and return the content of FOLDER/<part>.json."""
    import numpy as np
    import torch

    random.seed(cell.seed)
    np.random.seed(cell.seed)
    torch.manual_seed(cell.seed)
    torch.set_num_threads(getattr(cell, f"{name}_threads"))
    result: dict[str, Any] = {"seconds": {}, "refused": None}
    if name == "validate":
        found: list[LedgerEntry] = []
        steps = iter([("ledger", lambda: found.extend(entries(cell, source, folder)))])
    else:
        steps = compress(cell, source, folder, graphs)
    for stage, run in steps:
        started = time.monotonic()
        try:
            run()
        except Exception as e:
            result["refused"] = refused_by(stage, e)
            return result
        finally:
            result["seconds"][stage] = round(time.monotonic() - started, 2)
    if name == "validate":
        result["refused"] = refusal(found)
        result["ratios"] = ratios(found)
        result["unproven"] = {e.hop: e.why for e in found if e.ok is None}
    return result


def do(request: Mapping[str, Any]) -> None:
    """Carry out a request in the child."""
    cell, source = Cell(**request["cell"]), Path(request["source"])
    if request["do"] == "model":
        import torch

        from benchmarks.ledger.false_alarm_models import prepare

        torch.set_num_threads(1)
        prepare(cell.model, cell.seed, source)
        return
    folder = Path(request["folder"])
    result = part(request["do"], cell, source, folder, Path(request["graphs"]))
    partial = folder / "part.partial"
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.rename(folder / f"{request['do']}.json")


def forked(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a request in a child and return its answer."""
    child = os.fork()
    if child:
        _, status, used = os.wait4(child, 0)
        code = os.waitstatus_to_exitcode(status)
        return {"status": code, "cpu": round(used.ru_utime + used.ru_stime, 2)}
    code = 1
    try:
        signal.alarm(request["limit"])
        with Path(request["log"]).open("a", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ.update(request["environment"])
            try:
                do(request)
                code = 0
            except Exception:
                traceback.print_exc(file=log)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is not an answer
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # keeps the collectors of the children from copying this memory
    for line in sys.stdin:
        print(json.dumps(forked(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
