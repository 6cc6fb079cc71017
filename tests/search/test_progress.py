"""Progress of a search over kills: its time, and candidates that end the process."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.search import chosen_recipe, search
from optimizer.search.candidates import Candidate
from optimizer.search.progress import Progress
from optimizer.search.trial import Trial
from tests.conftest import write_tiny_recipe

TARGETS = "targets=[{runtime: onnxruntime, device: cpu}, {runtime: openvino, device: cpu}]"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def start(root: Path, clock: Clock, of: str = "recipe") -> Progress:
    return Progress(root, "tiny", of, clock, clock.now)


def test_a_resumed_search_counts_its_time_on_and_finished_trials_cost_none(tmp_path: Path) -> None:
    clock = Clock()
    progress = start(tmp_path, clock)
    for number in (1, 2):
        progress.begin(f"form {number}")
        clock.now += 50
        progress.end(number)
    clock.now += 7  # killed in the third trial
    again = start(tmp_path, clock)
    assert (again.finished, again.seconds) == (2, 100)
    for number in (1, 2):
        clock.now += 3  # reads what is finished
        again.end(number)
    assert again.seconds == 100
    clock.now += 50
    again.end(3)
    assert start(tmp_path, clock).seconds == 150
    assert start(tmp_path, clock, "other").seconds == 0


def trial(candidate: Candidate, ratio: float | None = None) -> Trial:
    return Trial(candidate, "+".join(candidate.methods), "kept", ratio=ratio)


def test_no_trial_starts_that_would_leave_no_time_for_a_confirmation(tmp_path: Path) -> None:
    """A trial takes 50 s, gates 30 s of which 10 s are timing, that may take 15 s; timing again
    takes up to 5 s: so a confirmation takes up to 40 s."""

    def resume() -> Progress:
        progress = start(tmp_path, clock)
        progress.timings, progress.again = {0: 15.0}, 5.0
        return progress

    clock, recipe, other = Clock(), Candidate(0, ("rtn",)), Candidate(0, ("gptq",))
    progress = resume()
    progress.begin("rtn")
    clock.now += 50
    progress.end(1)
    progress.validated = recipe
    progress.record_gates(0, 30.0, 10.0)
    assert progress.find_want_of_time(141, 0, []) == ""
    for one in (progress, resume()):
        assert "trial took up to 50 s" in one.find_want_of_time(139, 0, [])
    assert progress.find_want_of_confirmation(other, 91, []) == ""
    assert "takes up to 40 s" in progress.find_want_of_confirmation(other, 89, [])
    assert progress.find_want_of_confirmation(recipe, 89, []) == ""


def test_time_is_kept_for_the_gates_of_each_target(tmp_path: Path) -> None:
    """On a target whose answers take twice as long, all but timing is predicted to take twice as
    long, until its gates were run."""
    progress = start(tmp_path, Clock())
    progress.timings = {0: 15.0, 1: 15.0}
    own, other = trial(Candidate(0, ("rtn",)), 1.0), trial(Candidate(1, ("rtn",)), 2.0)
    progress.record_gates(0, 30.0, 10.0)
    assert progress.predict_confirmation(1, [own]) == 20 + 15
    assert progress.predict_confirmation(1, [own, other]) == 2 * 20 + 2 * 10
    assert "up to 60 s" in progress.find_want_of_time(59, 0, [own, other])
    progress.record_gates(1, 110.0, 15.0)
    assert progress.predict_confirmation(1, [own, other]) == 95 + 15
    assert progress.predict_confirmation(0, [own, other]) == 20 + 15


class Simulated(SimpleNamespace):
    """Workbench on a simulated clock. Each trial takes as long; gates of the slower target take
    longer; timing ends at its limit or before."""

    def __init__(self, recipe: Recipe, clock: Clock, seed: int) -> None:
        self.random, self.clock = random.Random(seed), clock
        slower = self.random.uniform(0.5, 3)
        super().__init__(recipe=recipe, search=recipe.search, first=Candidate(0, ("rtn",)))
        self.alpha, self.margin, self.times, self.sensitivities = 0.05, 0.1, None, {}
        self.ratios, self.trial = (1.0, slower), self.random.uniform(1, 30)
        self.work = self.random.uniform(5, 60)
        self.limit = recipe.search.budget.seconds_of_confirming  # type: ignore[union-attr]
        self.validated: list[Candidate] = []

    def kept(self, candidate: Candidate) -> tuple[str, ...]:
        return ()

    def build(self, candidate: Candidate) -> Any:
        return SimpleNamespace(candidate=candidate)

    def try_(self, candidate: Candidate, best: Candidate | None) -> Trial:
        self.clock.now += self.trial
        ratio = self.ratios[candidate.target]
        return replace(trial(candidate, ratio), ratio_interval=(ratio, ratio), drop=0.0, size=1)

    def judge(self, *_: Any) -> dict[str, Any]:
        return {"verdict": "pass"}

    def race(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.clock.now += self.random.uniform(0, self.limit)
        return {"to_recipe": {"median": 1.0, "interval": (0.9, 1.1)}}

    def validate(self, built: Any) -> tuple[str, dict[str, Any]]:
        """Only the last confirmation passes; steps of the first candidate are reused."""
        if built.candidate in self.validated:
            return "pass", {"speed": None}
        self.validated.append(built.candidate)
        timing = self.random.uniform(0, self.limit)
        self.clock.now += timing + self.work * max(self.ratios[built.candidate.target], 1.0)
        verdict = self.random.choice(["pass", "fail"])
        gates = [{"name": "quality", "verdict": verdict, "message": ""}]
        return verdict, {"speed": {"seconds": timing}, "gates": gates}

    def too_much_memory(self, report: Any) -> str:
        return ""


def test_simulated_searches_over_two_targets_end_within_their_budget(tmp_path: Path) -> None:
    file, others = write_tiny_recipe(tmp_path, tmp_path), 0
    for seed in range(40):
        hours = random.Random(seed).uniform(150, 900) / 3600
        recipe = recipe_file.read(file, [TARGETS, f"search.budget.hours={hours}"])
        clock = Clock()
        bench, progress = Simulated(recipe, clock, seed), start(tmp_path / str(seed), clock)
        progress.timings, progress.again = dict.fromkeys((0, 1), bench.limit), bench.limit
        space = [Candidate(t, (m,)) for m in ("rtn", *"abcdefgh") for t in (0, 1)]
        trials, _, _ = search._try_all(bench, space, progress)  # type: ignore[arg-type]
        search._confirm_best(bench, trials, progress)  # type: ignore[arg-type]
        assert progress.seconds <= bench.search.budget.seconds
        assert progress.over == ""
        others += any(candidate.target == 1 for candidate in bench.validated)
    assert others > 4


def test_gates_do_not_start_whose_timing_may_end_after_the_budget(tmp_path: Path) -> None:
    """The recipe's own trial leaves half of the time that the timing of its gates may take."""
    recipe = recipe_file.read(write_tiny_recipe(tmp_path, tmp_path), [TARGETS, "search={}"])
    clock = Clock()
    bench, progress = Simulated(recipe, clock, 0), start(tmp_path, clock)
    progress.timings = {0: bench.limit}
    bench.trial = bench.search.budget.seconds - bench.limit / 2
    trials, _, _ = search._try_all(bench, [bench.first], progress)  # type: ignore[arg-type]
    _, _, late = search._confirm_best(bench, trials, progress)  # type: ignore[arg-type]
    assert late
    assert bench.validated == []


def test_a_confirmation_that_ends_after_the_budget_is_recorded(tmp_path: Path) -> None:
    clock = Clock()
    progress = start(tmp_path, clock)
    late = "confirming rtn took 90 s, and up to 30 s were predicted"
    for seconds, over in ((10, ""), (90, late), (1, late)):
        with progress.watch("confirming rtn", 60, 30):
            clock.now += seconds
        assert progress.over == over


def test_a_form_in_which_the_process_ends_twice_without_a_step_is_skipped(tmp_path: Path) -> None:
    def resume() -> str:
        return start(tmp_path, Clock()).begin("gptq")

    assert resume() == ""
    assert resume() == ""  # ended once
    (tmp_path / "compress" / "key").mkdir(parents=True)
    (tmp_path / "compress" / "key" / "made_from.json").touch()
    assert resume() == ""  # ended again, after a step
    assert "ended twice" in resume()
    progress = start(tmp_path, Clock())
    progress.end(2)
    progress.begin("awq")
    assert "ended twice" in resume(), "a skipped candidate stays skipped after other trials"


def test_an_earlier_result_is_removed_and_a_users_file_stays(tmp_path: Path) -> None:
    recipe, out = tmp_path / "my.yaml", tmp_path / "my.found.yaml"
    assert not chosen_recipe.remove_earlier(recipe, out)
    out.write_text("name: mine\n")
    assert not chosen_recipe.remove_earlier(recipe, out)
    out.write_text(chosen_recipe.HEADER.format(name="my.yaml") + "name: mine\n")
    assert chosen_recipe.remove_earlier(recipe, out)
    assert not out.exists()
