"""The whole flow, as one straight function. A stage's dependencies are its arguments."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from optimizer import targets
from optimizer.recipe.schema import Recipe
from optimizer.store import Step, Store

Verdict = Literal["pass", "fail", "inconclusive"]
STAGES = ("load", "compress", "export", "lower", "build", "validate", "package")


@dataclass(frozen=True)
class Outcome:
    """What a run made: a report per target, in the recipe's order, and the bundle.

    Both are shorter than the recipe asks when `until` stopped the run before them.
    """

    reports: tuple[Step, ...]
    bundle: Step | None


def verdict(recipe: Recipe, reports: Sequence[Step]) -> Verdict:
    """The worst verdict of the targets that a bundle would hold (package/on_fail.py). In a dry run
    nothing failed yet: "pass"."""
    from optimizer.package import on_fail

    done = [(t, r) for t, r in zip(recipe.targets, reports, strict=True) if r.done]
    if not done:
        return "pass"
    verdicts = [json.loads((r.path / "report.json").read_text())["verdict"] for _, r in done]
    return on_fail.verdict([t.on_fail for t, _ in done], verdicts)


def run(recipe: Recipe, store: Store, until: str = "package") -> Outcome:
    """Take the recipe from checkpoint to bundle; finished steps are found, not redone.

    until: stop after this stage. Raises RecipeError before anything is read when a target
    cannot express what the recipe asks for. A bundle is packaged only when every gate passed of
    the targets in it.
    """
    from optimizer.build.stage import STAGE as build
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.compressed_tensors_stage import STAGE as format_
    from optimizer.lower.stage import STAGE as lower
    from optimizer.package.stage import STAGE as package
    from optimizer.validate.stage import STAGE as validate
    from optimizer.validate.stage import check_inputs

    targets.check(recipe)
    last = STAGES.index(until)
    reports: list[Step] = []
    made: list[Step] = []

    source = store.step(load, recipe.model)
    if last < STAGES.index("compress"):
        return Outcome((), None)
    if source.done:  # not yet, in a first `optimize plan`
        check_inputs(recipe.validation(recipe.targets[0]), source.path)
    state = store.step(compress, recipe.compression, source)
    for target in (t.made for t in recipe.targets):
        if last < STAGES.index("export"):
            break
        graph = store.step(export, target.export, source, state)
        if last < STAGES.index("lower"):
            continue
        model = store.step(lower, target, source, state, graph)
        if last < STAGES.index("build"):
            continue
        engine = store.step(build, target, model)
        if last < STAGES.index("validate"):
            continue
        report = store.step(
            validate, recipe.validation(target), source, state, graph, model, engine
        )
        reports.append(report)
        made += [model, engine, report]
    if last < STAGES.index("package") or verdict(recipe, reports) != "pass":
        return Outcome(tuple(reports), None)
    formats = [store.step(format_, section, source, state) for section in recipe.formatting]
    bundle = store.step(package, recipe.packaging, source, state, *made, *formats)
    return Outcome(tuple(reports), bundle)
