"""Make, judge and time one candidate after another, each as steps of the ordinary store.

So nothing is computed twice: two targets share the compressed state of a candidate, a killed search
finds its finished trials, and `optimize run` of the recipe that is found finds all its steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer import pipeline, targets
from optimizer.foundation.errors import MachineError, StoreError, explain_system_error
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.harness.errors import ExplainedError
from optimizer.harness.shown import scrub
from optimizer.recipe.schema import Compression, Recipe
from optimizer.recipe.search import Search
from optimizer.search.candidates import Candidate, choose_kept_modules, derive_recipe
from optimizer.search.stages import answered, judging, race, sensitivity
from optimizer.search.stages.sections import Judging, Race
from optimizer.search.stages.split import Part
from optimizer.search.trial import Interval, Outcome, Trial
from optimizer.shared_store import Root
from optimizer.store import Artifacts, Step, Store
from optimizer.validate.timing.cells import CANDIDATE
from optimizer.validate.timing.speed_gates import count_questions

Json = dict[str, Any]
Predicted = Callable[[Sequence[str]], Json]


@dataclass(frozen=True)
class BuiltCandidate:
    """Candidate whose model is built: its recipe, its steps, the bytes of its model's files."""

    candidate: Candidate
    recipe: Recipe
    artifacts: Artifacts[Step]
    size: int


@dataclass
class Workbench:
    """Builds, judges and times the candidates of one recipe, on one store.

    recipe: the user's recipe, with section search
    root: place of the store
    first: candidate that is the recipe itself
    count: number of candidates that the recipe admits, which share the time for timing
    times: function from the modules in higher precision to times of another machine; None:
        candidates are timed here
    sensitivities: {module: {"error", "weights"}}, set by `measure_modules`; {} before it
    """

    recipe: Recipe
    root: Root
    first: Candidate
    count: int = 1
    times: Predicted | None = None
    sensitivities: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    _built: dict[Candidate, BuiltCandidate] = field(default_factory=dict)

    @property
    def search(self) -> Search:
        assert self.recipe.search is not None
        return self.recipe.search

    @property
    def margin(self) -> float:
        """Largest drop of the metric that a search's candidate may have."""
        return derive_recipe(self.recipe, self.first).validate_.max_drop

    @property
    def alpha(self) -> float:
        """Error probability of the search's tests: 1 - validate.confidence."""
        return 1 - self.recipe.validate_.confidence

    def load(self) -> None:
        """Load the searched model."""
        self._base = self._steps(derive_recipe(self.recipe, self.first), "load")["load"]

    def prepare(self) -> Step:
        """Load the searched model, and answer the evaluation set with it; return the step of the
        answers."""
        self.load()
        target = self.recipe.targets[self.first.target].without_on_fail
        validation = self.recipe.validation(target)
        self._answered = self._store().step(answered.STAGE, validation, self._base)
        return self._answered

    @property
    def base(self) -> Path:
        """Folder of load of the searched model."""
        return self._base.path

    def predict_seconds_of_modules(self) -> float:
        """Predict the seconds in which the search measures the sensitivity of all modules."""
        return sensitivity.predict_seconds(self._modules_section, self._base.path)

    def measure_modules(self) -> None:
        """Measure the sensitivity of each module, by which candidates keep some in higher
        precision."""
        step = self._store().step(sensitivity.STAGE, self._modules_section, self._base)
        self.sensitivities = _read(step, sensitivity.FILE)

    @property
    def _modules_section(self) -> Compression:
        return sensitivity.make_section(self.recipe.compression)

    def kept(self, candidate: Candidate) -> tuple[str, ...]:
        """Return the modules that a candidate keeps in higher precision, once they are measured."""
        return choose_kept_modules(self.sensitivities, candidate.finer)

    def make(self, candidate: Candidate) -> None:
        """Make the model of a search's candidate up to stage lower, the modules measured first
        where it keeps some in higher precision. Raises the errors of its stages."""
        if candidate.finer and not self.sensitivities:
            self.measure_modules()
        self._steps(derive_recipe(self.recipe, candidate, self.kept(candidate)), "lower")

    def build(self, candidate: Candidate) -> BuiltCandidate:
        """Build the model of a search's candidate, or return it if it was built before.

        Raises the errors of its stages, and MachineError if its engine is not built on this
        machine.
        """
        if candidate not in self._built:
            recipe = derive_recipe(self.recipe, candidate, self.kept(candidate))
            steps = self._steps(recipe, "build")
            base = steps.get("recover") or steps.get("reduce") or steps["load"]
            parts = (base, steps["compress"], steps.get("export", base))
            artifacts = Artifacts(*parts, steps["lower"], steps["build"])
            files = targets.look_up(recipe.targets[0].runtime).model_files(steps["lower"].path)
            size = sum(file.stat().st_size for file in files)
            engine = _read(steps["build"], "engine.json")
            if engine["deferred"]:
                raise MachineError(
                    f"its engine is not built here: {engine['why']}",
                    where=f"target {recipe.targets[0].name}",
                    fix="Search on a machine that runs this target, or leave it out of "
                    "search.over.targets.",
                )
            self._built[candidate] = BuiltCandidate(candidate, recipe, artifacts, size)
        return self._built[candidate]

    def try_(self, candidate: Candidate, best: Candidate | None) -> Trial:
        """Try one candidate of the search and return its record.

        best: kept candidate with the lowest objective so far, timed beside this one; None for the
            recipe itself, which comes first and whose errors are raised
        """
        label, kept = candidate.label(self.recipe), self.kept(candidate)
        try:
            outcome, why, known = self._measure(candidate, best)
        except Exception as e:
            if candidate == self.first:
                raise
            return Trial(candidate, label, "refused", explain_refusal(label, e), kept)
        return Trial(candidate, label, outcome, why, kept, **known)

    def _measure(self, candidate: Candidate, best: Candidate | None) -> tuple[Outcome, str, Json]:
        """Judge and time a candidate; return (outcome, reason, figures). A missed limit ends it
        early."""
        built = self.build(candidate)
        known: Json = {"size": built.size}
        if why := self._too_large(built):
            return "stopped", why, known
        judged = self.judge(built, "search", self.alpha)
        known |= _quality(judged)
        if judged["verdict"] == "fail":
            return "stopped", explain_verdict(judged), known
        if self.search.timed and self.times is not None:
            known |= self.times(self.kept(candidate))
        elif self.search.timed:
            beside = {} if best is None else {race.RECIPE: self.first, race.BEST: best}
            raced = self.race(built, beside)
            known |= _times(raced)
            if why := self._too_slow(built, raced):
                return "stopped", why, known
        if judged["verdict"] == "inconclusive":
            return "undecided", explain_verdict(judged), known
        return "kept", "", known

    def judge(self, built: BuiltCandidate, part: Part, alpha: float) -> Json:
        """Judge a candidate's answers to one part of the rows at level alpha; return the content of
        judged.json."""
        validation = built.recipe.validation(built.recipe.targets[0])
        section = Judging(validation=validation, part=part, alpha=alpha)
        step = self._store().step(judging.STAGE, section, self._answered, built.artifacts)
        return _read(step, judging.FILE)

    def validate(self, built: BuiltCandidate) -> tuple[Verdict, Json]:
        """Run a candidate through all gates of its recipe; return their verdict and the report."""
        outcome = pipeline.run(built.recipe, Store(self.root, until="validate"))
        return pipeline.verdict(outcome.built), _read(outcome.built[0].report, "report.json")

    def find_limits_of_timing(self) -> tuple[dict[int, float], float]:
        """Return the seconds after which the timings of a confirmation end: {target: that of its
        gates}, and that beside the recipe."""
        latency = derive_recipe(self.recipe, self.first).validate_.latency
        gated = latency.max_seconds if count_questions(latency, 1) else 0.0
        timed = [not targets.look_up(target.runtime).untimed for target in self.recipe.targets]
        again = latency.max_seconds if self.search.timed and self.times is None else 0.0
        return {i: gated * own for i, own in enumerate(timed)}, again

    def race(
        self, built: BuiltCandidate, beside: Mapping[str, Candidate], *, confirm: bool = False
    ) -> Json:
        """Time a candidate in turns with others, and return the content of race.json
        (stages/race.py): in the first cell of validate.latency, with the batch of the objective.

        beside: {name of a system: candidate}; duplicates, and `built` itself, are left out
        confirm: True times again, for as long as validate would
        """
        systems: dict[str, BuiltCandidate] = {}
        for name, candidate in beside.items():
            if candidate not in (built.candidate, *(s.candidate for s in systems.values())):
                systems[name] = self.build(candidate)
        systems[CANDIDATE] = built
        latency = built.recipe.validate_.latency
        latency = latency.model_copy(update={"batch": (self.search.choose_batch(latency),)})
        seconds = self.search.budget.find_seconds_of_timing(self.count)
        section = Race(
            targets={name: s.recipe.targets[0] for name, s in systems.items()},
            latency=latency,
            seconds=latency.max_seconds if confirm else min(seconds, latency.max_seconds),
            purpose="confirm" if confirm else "search",
        )
        models = tuple(s.artifacts.model for s in systems.values())
        return _read(self._store().step(race.STAGE, section, self._base, models), race.FILE)

    def _too_large(self, built: BuiltCandidate) -> str:
        limit = self.search.constraints.size_mb
        if limit is None or built.size <= limit * 1e6:
            return ""
        return f"its files have {built.size / 1e6:.2f} MB; allowed: {limit:g} MB"

    def _too_slow(self, built: BuiltCandidate, raced: Json) -> str:
        latency = built.recipe.validate_.latency
        limit = latency.p99_ms if raced["batch"] == latency.batch[0] else None  # of that cell
        low = raced["systems"][CANDIDATE]["p99_interval"][0]
        if limit is None or low is None or low <= limit:
            return ""
        return f"its p99 is at least {low:.4g} ms; allowed: {limit:g} ms"

    def too_much_memory(self, report: Json) -> str:
        """Return a sentence on a candidate's peak memory beyond constraints.memory_mb; "" if it is
        within.

        report: report of stage validate
        """
        limit = self.search.constraints.memory_mb
        if limit is None:
            return ""
        peak = (report["speed"] or {}).get("peak_memory", {}).get(CANDIDATE)
        if peak is not None and peak <= limit * 1e6:
            return ""
        measured = "was not measured" if peak is None else f"is {peak / 1e6:.0f} MB"
        return f"its peak memory {measured}; allowed: {limit:g} MB"

    def _store(self, until: str | None = None) -> Store:
        store = Store(self.root, until=until)
        store.recipe = self.recipe.name
        return store

    def _steps(self, recipe: Recipe, until: str) -> dict[str, Step]:
        """Run a candidate's recipe up to stage `until`; return {stage: its first step}."""
        store = self._store(until)
        pipeline.run(recipe, store)
        first = reversed(store.log)  # of a smaller model, export makes the reference's graph last
        return {s["stage"]: Step(s["stage"], s["key"], Path(s["path"])) for s in first}


def explain_refusal(label: str, error: Exception) -> str:
    """Print and return the reason for which a search refuses one candidate, without passwords: it
    needs too much memory, or a library fails on it. The search tries the others.

    Raises `error` itself for a full disk and the like, which would refuse every candidate after it.
    """
    if isinstance(error, ExplainedError):
        why, shown = error.problem, str(error)
    else:
        why = shown = f"{type(error).__name__}: {error}"
    system = not isinstance(error, ExplainedError | MemoryError) and explain_system_error(error)
    if isinstance(error, StoreError) or system:
        raise error
    say(f"search: {label}: {shown}")
    return scrub(why)


def _read(step: Step, name: str) -> Json:
    document: Json = json.loads((step.path / name).read_text(encoding="utf-8"))
    return document


def _quality(judged: Json) -> Json:
    difference = judged["quality"]["difference"]
    low, high = difference["interval"]
    return {
        "drop": -difference["value"],
        "drop_interval": (-high, -low),
        "rows": judged["rows"],
        "alpha": judged["alpha"],
        "gates": tuple(judged["gates"]),
    }


def _times(raced: Json) -> Json:
    own = raced["systems"][CANDIDATE]
    ratio = raced["to_recipe"] or {"median": 1.0, "interval": (1.0, 1.0)}
    interval: Interval = tuple(ratio["interval"])
    return {
        "ratio": ratio["median"],
        "ratio_interval": interval,
        "p50": own["p50"],
        "p99": own["p99"],
        "modules": raced["modules"],
    }


def explain_verdict(judged: Json) -> str:
    """Return the message of the gate that decided the verdict on a search's candidate."""
    return str(find_deciding_gate(judged["gates"], judged["verdict"])["message"])


def find_deciding_gate(gates: Sequence[Json], verdict: str) -> Json:
    """Return the first gate of a candidate whose verdict is `verdict`, that of all gates
    together."""
    return next(gate for gate in gates if gate["verdict"] == verdict)
