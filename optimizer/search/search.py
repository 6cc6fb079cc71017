"""Search: trials of a recipe's candidates, their Pareto set, and the candidate that is found.

    recipe with section search, store -> Result

1. The model answers the evaluation set, whose rows are split (stages/split.py).
2. The recipe itself is tried, then the candidates without a share in higher precision. Then the
   modules are measured, and the candidates with a share are tried, until all were tried or the
   budget is spent. proposals.py orders candidates; workbench.py tries them.
3. Of the candidates that keep the margins and limits, the best by the objective (trial.py,
   order_for_confirmation) is judged on the held-out rows (sequential.py), timed again beside the
   recipe, and run through stage validate with all gates of the recipe. The first that passes is
   found.
4. With search.over.server the settings of its server are tuned (server_settings.py).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import GateError, InconclusiveError
from optimizer.foundation.progress import say
from optimizer.foundation.verdicts import Verdict
from optimizer.recipe.schema import Recipe
from optimizer.recipe.search import Search
from optimizer.search import candidates, enough_rows, kernel_times, sequential, server_settings
from optimizer.search.candidates import Candidate
from optimizer.search.expectation import Expectation
from optimizer.search.progress import Progress
from optimizer.search.proposals import Proposals, Ranked, Sampled, import_optuna
from optimizer.search.sequential import Confirmation
from optimizer.search.server_settings import TunedServer
from optimizer.search.stages import race
from optimizer.search.trial import Trial, find_pareto_set, get_objective, order_for_confirmation
from optimizer.search.workbench import (
    BuiltCandidate,
    Workbench,
    explain_refusal,
    explain_verdict,
    find_deciding_gate,
)
from optimizer.shared_store import Root
from optimizer.store import digest_file

MODULES = "sensitivities of modules"
Table = tuple[Path, Path | None]
"""(file of a table, public key that must have signed it)."""
EXIT = {"pass": 0, "fail": GateError.exit_code, "inconclusive": InconclusiveError.exit_code}


@dataclass(frozen=True)
class Result:
    """Result of a search.

    verdict: pass if a candidate was found
    chosen: recipe that was found; None without one
    trials: all trials, in order
    confirmations: results on held-out rows; the last one is the winner's if it passed
    space: number of candidates
    rows: {part: number of its rows, or windows}
    seconds: time of the search, earlier runs included
    raced: times of the found candidate and of the recipe, timed again; None without times
    times: name of the table from which times were predicted; "" if candidates were timed here
    server: the candidate with tuned settings of its server; None without search.over.server
    price: price per hour of the machine that answers; None: no costs
    unmeasured: reason for which modules were not measured, so that no candidate with a share in
        higher precision was tried; "" otherwise
    ended: reason for which no further trial started, where the budget ended the trials
    late: True where a candidate was not confirmed, because the budget did not suffice
    over: the confirmation that ended after the budget, and its times; "" without one
    """

    recipe: Recipe
    verdict: Verdict
    chosen: Recipe | None
    trials: tuple[Trial, ...]
    confirmations: tuple[Confirmation[Trial], ...]
    space: int
    rows: dict[str, int]
    seconds: float
    raced: dict[str, Any] | None
    times: str = ""
    server: TunedServer | None = None
    price: float | None = None
    unmeasured: str = ""
    ended: str = ""
    late: bool = False
    over: str = ""

    @property
    def exit_code(self) -> int:
        return EXIT[self.verdict]

    @property
    def section(self) -> Search:
        assert self.recipe.search is not None
        return self.recipe.search

    @property
    def winner(self) -> Trial | None:
        """Trial of the candidate that was found, also where its server misses section slo."""
        last = self.confirmations[-1:]
        return last[0].candidate if last and last[0].verdict == "pass" else None

    @property
    def pareto(self) -> list[Trial]:
        """The search's Pareto set: kept trials that no other kept trial beats in all figures."""
        return find_pareto_set(self.trials)


def run(
    recipe: Recipe,
    store: Root,
    clock: Callable[[], float] = time.monotonic,
    times: Table | None = None,
) -> Result:
    """Search for the best candidate of a recipe.

    store: place of the steps, which a resumed search reuses
    clock: function that returns seconds
    times: table of another machine's times, and the key that must have signed it; None: candidates
        are timed here

    Raises RecipeError for a section that admits nothing, DataError for too few rows, and the errors
    that the stages raise for the recipe itself.
    """
    started = clock()
    space = candidates.list_candidates(recipe)
    bench = Workbench(recipe, store, space[0], len(space))
    known = None
    if times is not None:
        kernel_times.check_recipe(recipe)
        known = kernel_times.read(*times, bench.build(space[0]))
        bench.times = known.figures
        say(f"search: times are predicted from {known.file}, of {known.machine}")
    answered = bench.prepare()
    section = recipe.validation(recipe.targets[space[0].target])
    rows = enough_rows.count(section, bench.margin, bench.base, answered.path)
    say(f"search: {len(space)} candidates; at most {bench.search.budget.trials} are tried")
    searched = [recipe.model_dump_json(by_alias=True), answered.key]
    searched += [] if times is None else [digest_file(times[0])]
    of = hashlib.sha256(" ".join(searched).encode())
    progress = Progress(store, recipe.name, of.hexdigest(), clock, started)
    progress.timings, progress.again = bench.find_limits_of_timing()
    trials, space, unmeasured = _try_all(bench, space, progress)
    confirmations, raced, late = _confirm_best(bench, trials, progress)
    won = bool(confirmations) and confirmations[-1].verdict == "pass"
    chosen = bench.build(confirmations[-1].candidate.candidate).recipe if won else None
    open_ = any(t.outcome == "undecided" for t in trials)
    open_ = open_ or any(c.verdict == "inconclusive" for c in confirmations)
    verdict: Verdict = "pass" if won else "inconclusive" if open_ else "fail"
    server = None
    if chosen is not None and bench.search.over.server:
        server = server_settings.tune(chosen, store)
        verdict, chosen = server.verdict, server.recipe if server.verdict == "pass" else None
    return Result(
        recipe,
        verdict,
        chosen,
        tuple(trials),
        tuple(confirmations),
        len(space),
        rows,
        progress.seconds,
        raced,
        "" if known is None else f"{known.file}, of {known.machine}",
        server,
        unmeasured=unmeasured,
        ended=progress.ended,
        late=late,
        over=progress.over,
    )


def _distinct(bench: Workbench, space: list[Candidate]) -> list[Candidate]:
    """Remove from a search candidates that keep the same modules in higher precision as an earlier
    one.

    A model with few modules has fewer different choices than SHARES.
    """
    seen: dict[tuple[Candidate, tuple[str, ...]], Candidate] = {}
    for candidate in space:
        seen.setdefault((replace(candidate, finer=0.0), bench.kept(candidate)), candidate)
    return list(seen.values())


def _try_all(
    bench: Workbench, space: list[Candidate], progress: Progress
) -> tuple[list[Trial], list[Candidate], str]:
    """Run a search's trials until all candidates were tried, or the budget is spent.

    The modules are measured once the candidates without a share in higher precision were tried, or,
    where there are fewer trials than candidates, after half of the trials.

    Returns the trials, all candidates, and the reason for which modules were not measured; "" if
    they were, or no candidate was left that needs it.
    """
    most = bench.search.budget.trials
    ranked = most
    if len(space) > most:
        import_optuna(len(space))  # before hours of work, not after them
        ranked = most // 2
    progress.begin(bench.first.label(bench.recipe))  # errors of the recipe itself are raised
    trials = [_announced(bench.try_(bench.first, None), 1)]
    progress.end(1)
    _reserve_confirmation(bench, trials[0], progress)
    rest = [c for c in space if not c.finer]
    _try_each(bench, rest, trials, progress, ranked)
    why = ""
    if len(rest) < len(space) and len(trials) < most:
        why = _measure_modules(bench, progress, trials)
        if why:
            say(f"search: modules were not measured: {why}")
        else:
            space = _fill_limit(bench, space, trials[0])
            rest = space = _distinct(bench, space)
    _try_each(bench, rest, trials, progress, ranked)
    if ranked < most:
        _try_each(bench, rest, trials, progress, most, sampled=True)
    return trials, space, why


def _measure_modules(bench: Workbench, progress: Progress, trials: list[Trial]) -> str:
    """Measure the modules where the search's budget suffices; return the reason why not, "" if they
    are."""
    if why := progress.decide(lambda: _find_want_of_time(bench, progress, trials)):
        return why
    if why := progress.begin(MODULES):
        return why
    try:
        bench.measure_modules()
    except Exception as e:
        return explain_refusal(MODULES, e)
    finally:
        progress.interrupt()
    return ""


def _find_want_of_time(bench: Workbench, progress: Progress, trials: list[Trial]) -> str:
    """Return why the rest of the search's budget does not suffice to measure the modules; "" if it
    does."""
    left = bench.search.budget.seconds - progress.seconds
    if left <= 0:
        return progress.describe_spent(bench.search.budget.seconds)
    targets = {t.candidate.target for t in trials if t.outcome == "kept"}
    left -= max((progress.predict_confirmation(one, trials) for one in targets), default=0.0)
    left = max(left, 0.0)
    needed = bench.predict_seconds_of_modules()
    if needed <= left:
        return ""
    return (
        f"it would take about {needed:.0f} s, and {left:.0f} s of search.budget.hours were left, "
        "without the time kept for a confirmation"
    )


def _fill_limit(bench: Workbench, space: list[Candidate], first: Trial) -> list[Candidate]:
    """Add candidates whose share fills the limit on size. first: trial of the recipe itself"""
    assert first.size is not None
    weights = sum(int(m["weights"]) for m in bench.sensitivities.values())
    return candidates.fill_limit(bench.recipe, space, first.size, weights)


def _try_each(
    bench: Workbench,
    space: list[Candidate],
    trials: list[Trial],
    progress: Progress,
    most: int,
    sampled: bool = False,
) -> None:
    """Try candidates of a space, and add their trials to `trials`, until all were tried or the
    budget is spent.

    most: number of trials, those before included
    sampled: True proposes candidates by the sampler
    """
    name, budget = bench.search.objective, bench.search.budget
    kept = {candidate: bench.kept(candidate) for candidate in space}
    _, added = candidates.count_added_bytes(bench.recipe.quantize)

    def expect(trials: Any) -> Expectation:
        return Expectation(bench.sensitivities, kept, trials, name, added)

    limit = bench.search.constraints.size_mb
    largest = math.inf if limit is None else limit * 1e6
    ranked = Ranked(space, expect, bench.margin, largest)
    proposals: Proposals = ranked
    if sampled:
        proposals = Sampled(ranked, name, bench.search.seed)
        for trial in trials:
            proposals.tell(trial)
    while len(trials) < most:
        candidate = proposals.propose(trials)
        if candidate is None:
            break
        if len(trials) >= progress.finished:
            progress.ended = progress.find_want_of_time(budget.seconds, candidate.target, trials)
            if progress.ended:
                break
        expected = expect(trials)
        figures = {"objective": expected.objectives([candidate])[0]}
        if bench.sensitivities:
            figures["error"] = expected.error(candidate)
        best = _best_first([t for t in trials if t.outcome == "kept"] or trials[:1], bench)[0]
        label = candidate.label(bench.recipe)
        if why := progress.begin(label):
            trial = Trial(candidate, label, "refused", why, kept[candidate])
        elif why := _find_smaller_excess(bench, candidate, trials, largest):
            trial = Trial(candidate, label, "stopped", why, kept[candidate])
        else:
            trial = _try(bench, candidate, best.candidate, progress)
        trial = replace(trial, expected=figures)
        proposals.tell(trial)
        trials.append(_announced(trial, len(trials) + 1))
        progress.end(len(trials))
        _reserve_confirmation(bench, trial, progress)


def _reserve_confirmation(bench: Workbench, trial: Trial, progress: Progress) -> None:
    """Run the first kept candidate through all gates, for the time that the confirmation of another
    one takes. Their verdicts are read, and errors reported, if the candidate is confirmed.

    Gates whose timing may end after the search's budget do not start."""
    budget, what = bench.search.budget.seconds, f"the gates of {trial.label}"
    late = progress.seconds + progress.timings.get(trial.candidate.target, 0.0) >= budget
    if trial.outcome != "kept" or progress.validated is not None or late:
        return
    if progress.begin(what):
        return
    say(f"search: {trial.label} goes through all gates, for the time that a confirmation takes")
    progress.validated, before = trial.candidate, progress.seconds
    predicted = progress.predict_confirmation(trial.candidate.target, ())
    try:
        with progress.watch(what, budget, predicted):
            built = bench.build(trial.candidate)
            if trial.candidate == bench.first:
                _judge_recipe(bench)
            _run_gates(bench, built, progress, before)
    except Exception as e:
        explain_refusal(trial.label, e)
    finally:
        progress.interrupt()


def _run_gates(
    bench: Workbench, built: BuiltCandidate, progress: Progress, before: float
) -> tuple[Verdict, Any]:
    """Run a search's candidate through all gates of its recipe, and record the time; return the
    verdict and the report.

    before: seconds of the search when the confirmation began, without that of timing again
    """
    verdict, report = bench.validate(built)
    timing = (report["speed"] or {}).get("seconds", 0.0)
    progress.record_gates(built.candidate.target, progress.seconds - before, timing)
    return verdict, report


def _find_smaller_excess(
    bench: Workbench, candidate: Candidate, trials: list[Trial], most: float
) -> str:
    """Return why a search's candidate is too large without building it: a trial was too large that
    differs from it only by fewer modules in higher precision. "" without such a trial, and where
    higher precision may take fewer bytes.

    most: largest bytes of the model's files allowed
    """
    quantize = bench.recipe.quantize
    if candidates.count_added_bytes(quantize)[0] < 0:
        return ""
    for trial in trials:
        like = trial.candidate
        same = replace(candidate, finer=like.finer) == like
        if not like.finer and candidates.drops_choice(quantize):
            continue  # candidates with a share lack what the recipe keeps by itself
        fewer = set(trial.kept) <= set(bench.kept(candidate))
        if same and fewer and trial.size is not None and trial.size > most:
            size = f"{trial.size / 1e6:.2f} MB; allowed: {most / 1e6:g} MB"
            return f"its files are at least as large as those of {trial.label}, which have {size}"
    return ""


def _try(bench: Workbench, candidate: Candidate, best: Candidate, progress: Progress) -> Trial:
    try:
        return bench.try_(candidate, best)
    except BaseException:
        progress.interrupt()
        raise


def _best_first(trials: list[Trial], bench: Workbench) -> list[Trial]:
    """Sort a search's trials by objective, then by drop."""

    def key(trial: Trial) -> tuple[float, float]:
        value = get_objective(trial, bench.search.objective)
        return (float("inf") if value is None else value, trial.drop or 0.0)

    return sorted(trials, key=key)


def _announced(trial: Trial, number: int) -> Trial:
    say(f"search: trial {number}: {trial.label}: {trial.summary}")
    return trial


def _judge_recipe(bench: Workbench) -> bool:
    """Return True if the recipe itself keeps the margin on the held-out rows."""
    level = sequential.confirmation_error(bench.alpha, 0)
    return bool(bench.judge(bench.build(bench.first), "held_out", level)["verdict"] == "pass")


def _confirm_best(
    bench: Workbench, trials: list[Trial], progress: Progress
) -> tuple[list[Confirmation[Trial]], dict[str, Any] | None, bool]:
    """Confirm kept candidates, the best first, until one passes or the budget does not suffice.

    Returns the confirmations, the times of the last candidate that was timed again (None: none
    was), and True where the budget did not suffice for one.
    """
    budget = bench.search.budget.seconds
    raced: dict[str, Any] = {}
    late: list[str] = []

    def judge(trial: Trial, alpha: float) -> tuple[Verdict, str]:
        if why := progress.find_want_of_confirmation(trial.candidate, budget, trials):
            late.append(why)
            return "inconclusive", why
        predicted = progress.predict_confirmation(trial.candidate.target, trials)
        try:
            with progress.watch(f"confirming {trial.label}", budget, predicted):
                return _confirm(bench, trial, alpha, raced, trials[0].outcome == "kept", progress)
        except Exception as e:  # such as LedgerError, with which export ends
            return "fail", explain_refusal(trial.label, e)

    ordered = order_for_confirmation(
        [t for t in trials if t.outcome == "kept"], bench.search.objective
    )
    confirmations = sequential.confirm(
        ordered, judge, bench.alpha, lambda trial: trial.candidate == bench.first
    )
    return confirmations, raced or None, bool(late)


def _confirm(
    bench: Workbench,
    trial: Trial,
    alpha: float,
    raced: dict[str, Any],
    recipe_kept: bool,
    progress: Progress,
) -> tuple[Verdict, str]:
    """Judge a kept candidate on held-out rows, beside the recipe, and by all gates of the recipe.

    A candidate slower than the recipe fails where the recipe itself keeps the margin.

    raced: filled with the times of the candidate
    recipe_kept: True where the trial of the recipe itself was kept
    """
    built, before = bench.build(trial.candidate), progress.seconds
    say(f"search: confirming {trial.label} on held-out rows")
    judged = bench.judge(built, "held_out", alpha)
    if judged["verdict"] != "pass":
        return judged["verdict"], f"on held-out rows: {explain_verdict(judged)}"
    raced.clear()
    if bench.times is None and bench.search.timed and trial.candidate != bench.first:
        judged_at = progress.seconds
        raced |= bench.race(built, {race.RECIPE: bench.first}, confirm=True)
        before += progress.seconds - judged_at
        low = raced["to_recipe"]["interval"][0]
        slower = bench.search.by_time and low is not None and low > 1
        if slower and recipe_kept and _judge_recipe(bench):
            return "fail", f"timed again it takes {raced['to_recipe']['median']:.3f} times as long"
    verdict, report = _run_gates(bench, built, progress, before)
    if verdict != "pass":
        gate = find_deciding_gate(report["gates"], verdict)
        return verdict, f"gate {gate['name']}: {gate['message']}"
    if why := bench.too_much_memory(report):
        return "fail", why
    return "pass", ""
