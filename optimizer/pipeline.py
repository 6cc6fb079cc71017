"""Pipeline from a recipe to a bundle: one function that runs the stages in order and stores each
step.

recipe, store -> Outcome. Called by commands/build/: plan.py (a dry store), request.py, outcome.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from optimizer.foundation.errors import StoreError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.errors import ExplainedError
from optimizer.recipe.schema import Export, Recipe
from optimizer.recipe.stage_sections import FailedTarget
from optimizer.store import Artifacts, Built, LabelModelSteps, Reference, Step, Stopped, Store


@dataclass
class Outcome:
    """Result of a run of the pipeline: its finished steps. Fields are filled in order and stay
    empty after the stage at which the store stops.

    recipe: the recipe; if the gates of its text encoder failed, the text encoder's recipe
    built: targets that every stage completed, in the recipe's order
    bundle: step of package, if every gate passed
    slo: load test of the bundle's server, if the recipe has a section slo
    left_out: targets with `on_fail: drop` that failed in a stage
    artifacts: steps of the first target in `built`
    """

    recipe: Recipe
    built: tuple[Built[Step], ...] = ()
    bundle: Step | None = None
    slo: Step | None = None
    left_out: tuple[FailedTarget, ...] = ()
    artifacts: Artifacts[Step] | None = None


def run(recipe: Recipe, store: Store) -> Outcome:
    """Take a recipe from checkpoint to bundle; finished steps are reused.

    recipe: recipe that passed its checks (optimizer.checks.read)

    `reference` is the user's checkpoint, which every result is compared with. `base` is the
    checkpoint that is compressed: the reference, or the result of reduce, recover or qat. Every
    target is built before the first is judged. A bundle is packaged only when every gate of its
    targets passed; publishing follows in commands/build/outcome.py.

    A recipe with section `texts` compresses an image-text model: its text encoder runs first, as a
    recipe of its own, and the run ends if a gate of that recipe does not pass.
    """
    texts = recipe.side_of_texts
    side = Outcome(recipe) if texts is None else run(texts, store)
    return _run(recipe, store, side) if verdict(side.built) == "pass" else side


def _run(recipe: Recipe, store: Store, side: Outcome) -> Outcome:
    """Run the stages of a recipe.

    side: outcome of the recipe's text encoder; empty for a recipe without section `texts`
    """
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export
    from optimizer.load.stage import STAGE as load
    from optimizer.load_test.stage import STAGE as slo
    from optimizer.lower.build import STAGE as build
    from optimizer.lower.stage import STAGE as lower
    from optimizer.package.stage import STAGE as package
    from optimizer.reduce.learn.qat import STAGE as qat
    from optimizer.reduce.learn.recover import STAGE as recover
    from optimizer.reduce.stage import STAGE as reduce
    from optimizer.validate.quality import widths
    from optimizer.validate.stage import STAGE as validate
    from optimizer.validate.stage import check_inputs
    from optimizer.validate.timing.stage import STAGE as latencies

    outcome, step, targets = Outcome(recipe), store.step, _Targets(recipe)
    store.recipe = recipe.name
    sections = [target.without_on_fail for target in recipe.targets]
    side_of_texts = recipe.model.side_of_texts

    def graph(i: int, checkpoint: Step, *state: Step) -> Step:
        """Export the graph of a target; one without a graph is lowered from the checkpoint."""
        section = sections[i].export
        return step(export, section, checkpoint, *state) if section else checkpoint

    with suppress(Stopped):
        reader = step(load, side_of_texts) if side_of_texts else None
        reference = smaller = base = step(load, recipe.model.without_data)
        if reference.done:  # not yet, in a first `optimize plan`
            check_inputs(recipe.validation(recipe.targets[0]), reference.path)
        table = step(latencies, recipe.latencies, reference) if recipe.latencies else None
        if recipe.reduce:
            base = smaller = step(reduce, recipe.reduction, reference, table)
        if recipe.recovery:
            if smaller.done:
                section = recipe.validation(recipe.targets[0])
                widths.check(section, reference.path, smaller.path)
            base = step(recover, recipe.recovery, reference, smaller)
        state, untrained = step(compress, recipe.compression, base), base
        if recipe.qat:
            base = state = step(qat, recipe.training, reference, base, state)

        texts = LabelModelSteps(reader, step(export, Export(), reader)) if reader else None
        graphs = targets.each("export", lambda i: graph(i, base, state))
        models = targets.each("lower", lambda i: step(lower, sections[i], base, state, graphs[i]))
        engines = targets.each("build", lambda i: step(build, sections[i], models[i]))
        originals: dict[int, Step] = {}
        if recipe.reduce or recipe.qat:
            originals = targets.each("export", lambda i: graph(i, reference))

        def artifacts(i: int) -> Artifacts[Step]:
            return Artifacts(base, state, graphs[i], models[i], engines[i])

        def report(i: int) -> Step:
            judged = None
            if i in originals:
                timed = table if recipe.reduce and recipe.reduce.measure_on == i else None
                judged = Reference(reference, originals[i], smaller, untrained, timed)
            section = recipe.validation(sections[i])
            return step(validate, section, artifacts(i), judged, side.artifacts)

        reports = targets.each("validate", report)
        outcome.built = tuple(
            Built(recipe.targets[i], models[i], engines[i], reports[i]) for i in targets.remaining
        )
        outcome.left_out = targets.left_out
        outcome.artifacts = artifacts(targets.remaining[0])
        if verdict(outcome.built) == "pass":
            packaging = recipe.packaging.model_copy(update={"left_out": outcome.left_out})
            read = texts or side.bundle
            outcome.bundle = step(package, packaging, base, state, outcome.built, read)
            if recipe.slo:
                outcome.slo = step(slo, recipe.slo, outcome.bundle)
    return outcome


def verdict(built: Sequence[Built[Step]]) -> Verdict:
    """Return the worst verdict of the targets that a bundle would hold (package/on_fail.py). In a
    dry run nothing is judged, and the verdict is "pass"."""
    from optimizer.package import on_fail

    done = [b for b in built if b.report.done]
    if not done:
        return "pass"
    verdicts = [json.loads((b.report.path / "report.json").read_text())["verdict"] for b in done]
    return on_fail.judge_targets([b.target.on_fail for b in done], verdicts)


@dataclass
class _Targets:
    """Targets of a recipe, of which `each` drops those that fail with `on_fail: drop`.

    errors: {index of a dropped target: (stage, error)}
    """

    recipe: Recipe
    errors: dict[int, tuple[str, ExplainedError]] = field(default_factory=dict)

    @property
    def remaining(self) -> list[int]:
        """Indices of the targets that were not dropped."""
        return [i for i in range(len(self.recipe.targets)) if i not in self.errors]

    @property
    def left_out(self) -> tuple[FailedTarget, ...]:
        """Dropped targets, each with the stage and the message of its error."""
        errors = sorted(self.errors.items())
        return tuple(
            FailedTarget(target=i, stage=stage, message=error.problem)
            for i, (stage, error) in errors
        )

    def each(self, stage: str, make: Callable[[int], Step]) -> dict[int, Step]:
        """Make a step for each remaining target; return {index of the target: step}.

        make: function from a target's index to its step

        An error drops a target with `on_fail: drop` while others remain. Any other error, and every
        StoreError, is raised.
        """
        steps = {}
        for i in self.remaining:
            try:
                steps[i] = make(i)
            except ExplainedError as error:
                target = self.recipe.targets[i]
                lasting = isinstance(error, StoreError)  # a full disk is not a target's fault
                if lasting or target.on_fail != "drop" or self.remaining == [i]:
                    raise
                self.errors[i] = stage, error
                say(f"{stage}: dropping target {target.name} (on_fail: drop): {error}")
        return steps
