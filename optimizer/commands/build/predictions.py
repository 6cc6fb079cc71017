"""Predictions of `optimize plan`: steps that would run, the reasons, and their needs.

dry store -> entries -> table. Each stage's `estimate` predicts from the checkpoint's headers
(tensor names and shapes). Nothing is written.
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from optimizer.recipe.stage_sections import Validation
from optimizer.recipe.targets import TargetSection
from optimizer.store import MADE_FROM, CompressedShapes, Estimate, Shapes, Store

NAMED = 3
"""Maximum changed settings named in `why`; further ones are counted."""

BRIEF = 30
"""Maximum characters of a value in `why`, so that a row fits a terminal."""


def build_document(store: Store) -> list[dict[str, Any]]:
    """Predict each step of a run for `optimize plan`; return an entry per step.

    An entry is {stage, key, target, what: "reuse", "fetch" or "run", why}; with `disk` to fetch,
    and with `memory`, `disk`, `seconds` and `device_memory` on a GPU to run. `target` is the name
    of the target that the step is for alone, else "". Sizes are in bytes.

    store: dry store after `pipeline.run`

    Raises RecipeError for a recipe that reduce or compress would refuse, once the model is loaded.
    """
    _refuse_misfits(store)
    written: dict[str, Shapes] = {}  # {key of a step: shapes that it writes}
    entries = []
    for logged in store.log:
        inputs = [written[step.key] for step in logged["inputs"]]
        stage = logged["of"]
        read = next((i for i in inputs if isinstance(i, CompressedShapes)), next(iter(inputs), {}))
        own = stage.shapes(logged["section"], *inputs) if stage.shapes else read
        written[logged["key"]] = own
        entries.append(_entry(logged, store, read if inputs else own))
    return entries


def _refuse_misfits(store: Store) -> None:
    steps = {step["step"].stage: step for step in store.log}
    reduce, compress = steps.get("reduce"), steps.get("compress")
    if reduce and reduce["inputs"][0].done and not reduce["step"].done:
        from optimizer.reduce.stage import check as check_reduce

        check_reduce(reduce["section"], reduce["inputs"][0].path)
    if compress and compress["inputs"][0].done and not compress["step"].done:
        from optimizer.compress.stage import check

        check(compress["section"], compress["inputs"][0].path)


def _entry(logged: dict[str, Any], store: Store, shapes: Shapes) -> dict[str, Any]:
    """Return the plan's entry of one step: reused, fetched, or run with its predicted needs.

    logged: the dry store's record of the step
    shapes: shapes of the checkpoint's tensors
    """
    step, stage = logged["step"], logged["of"]
    entry = {
        "stage": step.stage,
        "key": step.key,
        "target": _name_target(logged["section"]),
        "what": "reuse",
        "why": "finished before",
    }
    if step.unfetched is not None:
        size = sum(file["size"] for file in step.unfetched.values())
        return {**entry, "what": "fetch", "why": "finished on another machine", "disk": size}
    if step.done:
        return entry
    estimate = stage.estimate(logged["section"], shapes) if stage.estimate else Estimate()
    remark = stage.remark(logged["section"]) if stage.remark else ""
    why = _explain_run(logged["made_from"], store.folder / step.stage, store.recipe)
    return {
        **entry,
        "what": "run",
        "why": "; ".join(filter(None, (why, remark, estimate.comment))),
        "memory": estimate.memory,
        "disk": estimate.disk,
        "seconds": estimate.seconds,
        "device_memory": estimate.device_memory,
    }


def _name_target(section: Any) -> str:
    """Return the name of the target that a step of the plan is for, by its section of the recipe;
    "" for a step of all targets."""
    if isinstance(section, Validation):
        section = section.target
    return section.name if isinstance(section, TargetSection) else ""


def _explain_run(made_from: dict[str, Any], folder: Path, recipe: str) -> str:
    """Explain for `optimize plan` why a step runs: the settings that changed since the most similar
    finished step of this recipe, or, without such a step, "new for recipe NAME".

    folder: finished steps of the same stage, of any recipe
    """
    best: list[str] | None = None
    for file in folder.glob(f"*/{MADE_FROM}"):
        try:
            finished = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            finished = None
        if not isinstance(finished, dict) or finished.get("recipe") != recipe:
            continue  # damaged, or of another recipe
        differences = _differences(made_from, finished)
        if best is None or len(differences) < len(best):
            best = differences
    if best is None:
        return f"new for recipe {recipe}" if recipe else "not in this store yet"
    more = f" and {len(best) - NAMED} more" if len(best) > NAMED else ""
    return "changed: " + ", ".join(best[:NAMED]) + more


def _differences(new: Any, old: Any, at: str = "") -> list[str]:
    """Write for `optimize plan` a phrase per difference between the keys of two steps, such as "the
    code of this step".

    at: path of `new` and `old` within the keys
    """
    if isinstance(new, dict) and isinstance(old, dict):
        keys = [
            k
            for k in new
            if at or k in ("stage_version", "code", "section", "inputs", "reads", "packages")
        ]
        return [d for k in keys for d in _differences(new[k], old.get(k), f"{at}.{k}".lstrip("."))]
    if new == old:
        return []
    if at == "inputs":
        return ["an earlier step"]
    if at == "code":
        return ["the code of this step"]
    if at.startswith("reads."):
        return [f"the content of {at.removeprefix('reads.')}"]
    return [f"{at.removeprefix('section.')}: {_brief(old)} -> {_brief(new)}"]


def _brief(value: Any) -> str:
    return textwrap.shorten(str(value), BRIEF, placeholder="...")


def format_entries(entries: list[dict[str, Any]]) -> str:
    """Format the predicted needs of a run's steps for `optimize plan`: a table with totals, the
    peak of memory and the sums of disk and time."""
    rows = [f"{'step':<10}{'':<8}{'memory':>9}{'disk':>9}{'time':>9}  why"]
    for e in entries:
        need = (
            f"{format_bytes(e['memory']):>9}{format_bytes(e['disk']):>9}{_seconds(e['seconds']):>9}"
            if e["what"] == "run"
            else f"{'-':>9}{format_bytes(e['disk']) if 'disk' in e else '-':>9}{'-':>9}"
        )
        target = f"{e['target']}: " if e.get("target") else ""
        rows.append(f"{e['stage']:<10}{e['what']:<8}{need}  {target}{e['why']}")
    running = [e for e in entries if e["what"] == "run"]
    searched = "; the search comes on top" if any(e["what"] == "try" for e in entries) else ""
    rows.append(
        f"{'total':<10}{len(running)} to run"
        f"{format_bytes(max((e['memory'] for e in running), default=0)):>9}"
        f"{format_bytes(sum(e.get('disk', 0) for e in entries)):>9}"
        f"{_seconds(sum(e['seconds'] for e in running)):>9}"
        f"  (memory: the highest peak{searched})"
    )
    on_gpu: dict[str, int] = {}
    for e in running:
        on_gpu[e["stage"]] = max(e["device_memory"], on_gpu.get(e["stage"], 0))
    needs = [f"{stage} {format_bytes(size)}" for stage, size in on_gpu.items() if size]
    if needs:
        rows.append(f"memory of a GPU, where torch can use one: {', '.join(needs)}")
    return "\n".join(rows)


def format_bytes(count: int) -> str:
    """Format bytes for `optimize plan` in B, KB, MB, GB or TB (powers of 1000), with one decimal
    from GB on."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            break
        size, unit = size / 1000, {"B": "KB", "KB": "MB", "MB": "GB", "GB": "TB"}[unit]
    return f"{size:.0f} {unit}" if unit in ("B", "KB", "MB") else f"{size:.1f} {unit}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
