"""The whole flow, as one straight function. A stage's dependencies are its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from optimizer import targets
from optimizer.checks import timed_targets
from optimizer.foundation.errors import StoreError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.errors import ExplainedError
from optimizer.harness.process.temporary import check_place
from optimizer.recipe.schema import Recipe, TargetSection
from optimizer.recipe.stage_sections import LeftOut
from optimizer.store import Step, Stopped, Store
from optimizer.targets import missing_packages


@dataclass(frozen=True)
class Built:
    """What was made of one target: its lowered model, its engine, and the report on both."""

    target: TargetSection
    model: Step
    engine: Step
    report: Step

    @property
    def steps(self) -> tuple[Step, Step, Step]:
        return self.model, self.engine, self.report


@dataclass
class Outcome:
    """What a run came to: its targets in the recipe's order, the bundle, and what its server kept
    under load. Filled as the run goes, so that they are empty where the store stopped it before
    them, or the recipe asks for no such thing. left_out: targets that a stage could not make."""

    built: tuple[Built, ...] = ()
    bundle: Step | None = None
    slo: Step | None = None
    left_out: tuple[LeftOut, ...] = ()


def verdict(built: Sequence[Built]) -> Verdict:
    """The worst verdict of the targets that a bundle would hold (package/on_fail.py). In a dry run
    nothing failed yet: "pass"."""
    from optimizer.package import on_fail

    done = [b for b in built if b.report.done]
    if not done:
        return "pass"
    verdicts = [json.loads((b.report.path / "report.json").read_text())["verdict"] for b in done]
    return on_fail.verdict([b.target.on_fail for b in done], verdicts)


@dataclass
class _Targets:
    """Those of a recipe on their way through the stages. errors: {place: what ended its way}."""

    recipe: Recipe
    errors: dict[int, tuple[str, ExplainedError]] = field(default_factory=dict)

    @property
    def places(self) -> list[int]:
        """Of those that are still on their way."""
        return [i for i in range(len(self.recipe.targets)) if i not in self.errors]

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        errors = sorted(self.errors.items())
        return tuple(
            LeftOut(target=i, stage=stage, message=error.problem) for i, (stage, error) in errors
        )

    def each(self, stage: str, make: Callable[[int], Step]) -> dict[int, Step]:
        """{place: step} of those on their way. An error of `make` ends the way of a target with
        `on_fail: drop`, where others are left, and is raised of any other."""
        steps = {}
        for place in self.places:
            try:
                steps[place] = make(place)
            except ExplainedError as error:
                target = self.recipe.targets[place]
                lasting = isinstance(error, StoreError)  # a full disk is not a target's fault
                if lasting or target.on_fail != "drop" or self.places == [place]:
                    raise
                self.errors[place] = stage, error
                say(f"{stage}: {target.name} is dropped, as its on_fail says: {error}")
        return steps


def _gated(smaller: Step, recipe: Recipe, reference: Step) -> Step:
    """The smaller model. Raises RecipeError, before it learns anything, where no gate of the recipe
    could compare it with the reference."""
    from optimizer.validate.quality import widths

    if smaller.done:
        widths.check(recipe.validation(recipe.targets[0]), reference.path, smaller.path)
    return smaller


def _check(recipe: Recipe, store: Store) -> None:
    """What can be known without reading anything; see `run`."""
    check_place()
    targets.check(recipe)
    timed_targets.check(recipe)
    if store.reaches("validate"):
        missing_packages.check(recipe)
    if store.reaches("publish"):
        from optimizer.publish import stage

        stage.check(recipe.publish)


def run(recipe: Recipe, store: Store) -> Outcome:
    """Take the recipe from checkpoint to bundle; finished steps are found, not redone.

    Two checkpoints run through it: `reference` is what the user gave, and what everything is judged
    against; `base` is the one that goes on: the reference, or what reduce, recover and qat made.

    Every target is built before the first is judged. One with `on_fail: drop` that a stage cannot
    make is left out; where it is the last of them its error is raised. A bundle is packaged only
    when every gate passed of the targets in it, served under load where the recipe says what it
    must keep, and published after (commands/build/outcome.py). Ends early where store.until says
    so. Before anything is read, raises RecipeError for a target that cannot
    express the recipe or a wrong address, MachineError for what is missing to judge or publish.
    """
    _check(recipe, store)
    store.recipe = recipe.name
    from optimizer.compress.stage import STAGE as compress
    from optimizer.load.stage import STAGE as load
    from optimizer.reduce.learn.qat import STAGE as qat
    from optimizer.reduce.learn.recover import STAGE as recover
    from optimizer.reduce.stage import STAGE as reduce
    from optimizer.validate.stage import check_inputs
    from optimizer.validate.timing.stage import STAGE as latencies

    outcome, step, timed = Outcome(), store.step, list[Step]()
    with suppress(Stopped):
        reference = smaller = base = step(load, recipe.model)
        if reference.done:  # not yet, in a first `optimize plan`
            check_inputs(recipe.validation(recipe.targets[0]), reference.path)
        if recipe.reduce:
            timed = [step(latencies, recipe.latencies, reference)] if recipe.latencies else []
            base = smaller = step(reduce, recipe.reduction, reference, *timed)
            if recipe.recovery:
                base = step(recover, recipe.recovery, reference, _gated(smaller, recipe, reference))
        state, untrained = step(compress, recipe.compression, base), base
        if recipe.qat:
            base = state = step(qat, recipe.training, reference, base, state)
        # Where base is another model: the reference, and what the steps between made.
        others = (reference, smaller, untrained) if recipe.reduce or recipe.qat else ()
        on = _Targets(recipe)
        outcome.built = _built(on, store, (base, state), others, timed)
        outcome.left_out = on.left_out
        if verdict(outcome.built) == "pass":
            _bundled(recipe, store, outcome, (base, state))
    return outcome


def _built(
    on: _Targets,
    store: Store,
    model: tuple[Step, Step],
    others: Sequence[Step],
    timed: Sequence[Step],
) -> tuple[Built, ...]:
    """Every target that the stages could make. model: its base and its state. others: where base is
    another model, the reference, the smaller one and the one that was compressed. timed: the table
    of latencies, of the target that it was measured on."""
    from optimizer.export.stage import STAGE as export
    from optimizer.lower.build import STAGE as build
    from optimizer.lower.stage import STAGE as lower
    from optimizer.validate.stage import STAGE as validate

    recipe, step, (base, state) = on.recipe, store.step, model
    parts = [t.without_on_fail for t in recipe.targets]

    def graph(place: int, *of: Step) -> Step:
        """A target without a graph is lowered from the checkpoint itself."""
        section = parts[place].export
        return step(export, section, *of) if section else base

    graphs = on.each("export", lambda i: graph(i, base, state))
    models = on.each("lower", lambda i: step(lower, parts[i], base, state, graphs[i]))
    engines = on.each("build", lambda i: step(build, parts[i], models[i]))
    originals: dict[int, tuple[Step, ...]] = {}
    if others:
        reference, *between = others
        wholes = on.each("export", lambda i: graph(i, reference))
        originals = {i: (reference, whole, *between) for i, whole in wholes.items()}
    if recipe.reduce and recipe.reduce.measure_on in originals:
        originals[recipe.reduce.measure_on] += (*timed,)

    def report(place: int) -> Step:
        judged = base, state, graphs[place], models[place], engines[place]
        section = recipe.validation(parts[place])
        return step(validate, section, *judged, *originals.get(place, ()))

    reports = on.each("validate", report)
    return tuple(Built(recipe.targets[i], models[i], engines[i], reports[i]) for i in on.places)


def _bundled(recipe: Recipe, store: Store, outcome: Outcome, model: tuple[Step, Step]) -> None:
    """The bundle, and what its server keeps under load. model: its base and its state."""
    from optimizer.load_test.stage import STAGE as slo
    from optimizer.package.stage import STAGE as package

    folders = [s for b in outcome.built for s in b.steps]
    section = recipe.packaging.model_copy(update={"left_out": outcome.left_out})
    outcome.bundle = store.step(package, section, *model, *folders)
    if recipe.slo:
        outcome.slo = store.step(slo, recipe.slo, outcome.bundle)
