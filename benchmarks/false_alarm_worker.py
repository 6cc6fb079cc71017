"""One part of one cell of false_alarms.py, in a process of its own whose environment says which
processor it believes to have.

    python false_alarm_worker.py model MODEL SEED SOURCE         the load stage's folder, at SOURCE
    python false_alarm_worker.py compress CELL SOURCE FOLDER     compress to build, below FOLDER
    python false_alarm_worker.py validate CELL SOURCE FOLDER     the ledger of what is there

CELL: a JSON object of its fields. The last two write FOLDER/<part>.json:
    seconds   {stage: seconds}
    refused   null | {stage, hop, kind, messages}: kind is "verdict" (a stage or a hop refuses),
              "crash" (it raised what it should not), or "unsupported" (the recipe cannot be done)
    ratios    [[hop and piece kind, measured / limit, module or output], ...] (validate only)
    unproven  {hop: why}, of hops that were not run here (validate only)
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from false_alarm_cells import TEXTS, Cell, recipe

if TYPE_CHECKING:
    from optimizer.validate.hops import Entry

NOT_BUILT = "false_alarms.py judges the lowered model: engines are built by `optimize`"


def compress(cell: Cell, source: Path, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """(stage, what it does), in order: compress, export, lower, build."""
    from optimizer.build.stage import STAGE as build
    from optimizer.compress.stage import STAGE as compress_
    from optimizer.export.stage import STAGE as export
    from optimizer.lower.stage import STAGE as lower

    made = recipe(cell, str(source))
    target = made.targets[0]
    state, graph, model, engine = (folder / n for n in ("state", "graph", "model", "engine"))
    for made_folder in (state, graph, model, engine):
        made_folder.mkdir(parents=True)
    yield "compress", lambda: compress_.run(made.compression, source, out=state)
    yield "export", lambda: export.run(target.export, source, state, out=graph)
    yield "lower", lambda: lower.run(target, source, state, graph, out=model)
    if target.runtime == "onnxruntime":
        yield "build", lambda: build.run(target, model, out=engine)
    else:
        document = {"deferred": True, "why": NOT_BUILT, "inspected": None}
        (engine / "engine.json").write_text(json.dumps(document))


def entries(cell: Cell, source: Path, folder: Path) -> list[Entry]:
    """The ledger as the validate stage runs it, but with the threads that the cell asks for: the
    stage has one."""
    import torch

    from optimizer.load.datasets import samples
    from optimizer.validate import ledger
    from optimizer.validate.materials import Materials

    torch.set_num_threads(cell.validate_threads)
    made = recipe(cell, str(source))
    section = made.validation(made.targets[0])
    rows = samples(section.validate_.data, 200, cell.seed)
    texts = sorted(dict.fromkeys(r.text for r in rows), key=len)
    chosen = [texts[round(i * (len(texts) - 1) / (TEXTS - 1))] for i in range(TEXTS)]
    folders = (folder / n for n in ("state", "graph", "model", "engine"))
    return ledger.run(Materials(section, source, *folders, texts=chosen))


def ratios(found: Sequence[Entry]) -> list[tuple[str, float, str]]:
    """(hop and kind of piece, measured / limit, module or output) of everything that has a limit.

    The compress hop's budget is the recipe's, no limit of the ledger's.
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
    """JSON has no infinity."""
    return float(f"{ratio:.4g}") if math.isfinite(ratio) else 1e30


def refusal(found: Sequence[Entry]) -> dict[str, Any] | None:
    """What the first hop that failed says; the hops after it often fail of the same fault."""
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
    """What a stage that raised says."""
    from optimizer.errors import OptimizeError, RecipeError

    kind = "verdict" if isinstance(error, OptimizeError) else "crash"
    kind = "unsupported" if isinstance(error, RecipeError) else kind
    messages = [f"{type(error).__name__}: {error}"]
    if kind == "crash":
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        messages += [f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames]
    return {"stage": stage, "hop": "", "kind": kind, "messages": messages}


def part(name: str, cell: Cell, source: Path, folder: Path) -> dict[str, Any]:
    """What FOLDER/<part>.json says."""
    import torch

    torch.set_num_threads(getattr(cell, f"{name}_threads"))
    result: dict[str, Any] = {"seconds": {}, "refused": None}
    if name == "validate":
        found: list[Entry] = []
        steps = iter([("ledger", lambda: found.extend(entries(cell, source, folder)))])
    else:
        steps = compress(cell, source, folder)
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


def main(arguments: Sequence[str]) -> None:
    name, what, *rest = arguments
    if name == "model":
        from false_alarm_models import prepare

        prepare(what, int(rest[0]), Path(rest[1]))
        return
    source, folder = map(Path, rest)
    result = part(name, Cell(**json.loads(what)), source, folder)
    (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
