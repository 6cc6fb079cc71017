"""A search of a tiny model: its winner, its files, and its result after kills."""

from __future__ import annotations

import errno
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer import pipeline
from optimizer.cli import main
from optimizer.foundation.errors import DataError, LedgerError, RecipeError
from optimizer.load_test import measure, tuned_server
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.search import chosen_recipe, report, search
from optimizer.search.candidates import Candidate, derive_recipe
from optimizer.search.progress import Progress
from optimizer.search.search import Result
from optimizer.search.sequential import Confirmation
from optimizer.search.trial import Trial
from optimizer.search.workbench import BuiltCandidate, Workbench
from optimizer.store import Store
from tests.conftest import sentences, write_rows, write_tiny_recipe
from tests.test_killed import Runner, finished

SECTION = "search: {over: {method: [gptq], precision: recipe}, objective: size}\n"
PER_MODULE = ["search.over.precision=per_module"]
STAGES = ("answered", "judged", "sensitivity", "compress", "lower", "validate")


DECODER = """\
name: tiny
model: {{source: {model}, task: text-generation}}
calibrate: {{data: {{source: text, files: [calibrate.txt]}}, samples: 8, sequence_length: 32}}
quantize: {{method: rtn, weights: {{bits: 4, granularity: group, group_size: 32}}}}
targets: [{{runtime: onnxruntime, device: cpu, threads: 1}}]
validate:
  data: {{source: text, files: [evaluate.txt]}}
  metric: perplexity
  sequence_length: 48
  max_drop: 0.5
  quantization_budget: 2
  ledger: end_to_end
  latency: {{sequence: [16], new_tokens: 8, iterations: 5, must_beat_float: false, max_seconds: 5}}
search: {{over: {{method: [rtn]}}, objective: size}}
"""


def write(folder: Path, model: Path) -> Path:
    recipe = write_tiny_recipe(folder, model)
    write_rows(folder / "evaluate.jsonl", 110, seed=2)
    text = recipe.read_text().replace("max_drop: 0.1", "max_drop: 0.1\n  ledger: end_to_end")
    recipe.write_text(text + SECTION)
    return recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return write(tmp_path_factory.mktemp("recipe"), tiny_bert)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def result(recipe: Path, store: Path) -> Result:
    return search.run(recipe_file.read(recipe), store)


def test_the_smallest_form_is_found_and_every_step_of_its_recipe_is_finished(
    recipe: Path, store: Path, result: Result
) -> None:
    winner = result.confirmations[-1].candidate
    assert result.exit_code == 0
    assert winner in result.pareto
    assert [t.candidate.methods for t in result.trials] == [("rtn",), ("gptq",)]
    assert winner.size == min(t.size or 0 for t in result.trials if t.outcome == "kept")
    assert result.chosen is not None
    file = recipe.with_name("found.yaml")
    chosen_recipe.write(recipe, (), winner.candidate.target, result.chosen, file)
    run = Store(store, until="validate")
    pipeline.run(recipe_file.read(file), run)
    assert {step["what"] for step in run.log} == {"reused"}


def test_by_quality_the_form_with_the_lowest_drop_is_found(
    recipe: Path, store: Path, result: Result
) -> None:
    over = ["search.objective=quality", "search.constraints={size_mb: 100}"]
    best = search.run(recipe_file.read(recipe, over), store)
    assert [t.drop for t in best.trials] == [t.drop for t in result.trials]
    kept = [t for t in best.trials if t.outcome == "kept"]
    assert best.confirmations[0].candidate.drop == min(t.drop or 0.0 for t in kept)
    with pytest.raises(RecipeError, match="objective: quality without a limit"):
        recipe_file.read(recipe, over[:1])


def test_what_keeps_more_modules_than_a_form_that_is_too_large_is_not_built(
    recipe: Path, store: Path, result: Result
) -> None:
    limit = (result.trials[0].size or 0) / 1e6 - 1e-6
    over = ["search.over={method: [rtn]}", f"search.constraints={{size_mb: {limit}}}"]
    limited = search.run(recipe_file.read(recipe, over), store)
    first, *others = limited.trials
    assert first.size is not None
    assert others
    assert {(t.outcome, t.size) for t in others} == {("stopped", None)}
    assert all(first.label in t.why for t in others)


def test_modules_are_measured_only_after_the_candidates_that_do_not_need_it(
    recipe: Path, store: Path, result: Result
) -> None:
    whole = search.run(recipe_file.read(recipe, PER_MODULE), store)
    assert whole.trials[:2] == result.trials
    assert all(t.kept for t in whole.trials[2:])
    assert len(whole.trials) == whole.space > 2
    assert whole.unmeasured == ""


@pytest.mark.parametrize(
    ("hours", "step", "tried", "why", "code"),
    [(1, 7200.0, 1, "hours were spent", 4), (1e-6, 0.0, 2, "it would take about", 0)],
)
def test_where_the_budget_does_not_suffice_nothing_more_is_tried_also_when_resumed(
    recipe: Path, store: Path, hours: float, step: float, tried: int, why: str, code: int
) -> None:
    """Each look at the clock finds it `step` seconds later. The recipe itself was tried
    beyond the hours in the first case, so nothing is claimed."""
    short = recipe_file.read(recipe, [*PER_MODULE, f"search.budget.hours={hours}"])
    first = search.run(short, store, itertools.count(0.0, step).__next__)
    again = search.run(short, store, lambda: 0.0)
    for ended in (first, again):
        assert why in ended.unmeasured
        shown = report.write_text(ended, report.build_document(ended, Path("x"), Path("y")))
        assert "Not tried: candidates with some modules in float" in shown
        assert (f"Tried 1 of {ended.space} candidates" in shown) == (tried == 1)
        assert ended.exit_code == code
        assert ("hours did not suffice" in shown) == (code == 4)
    assert [t.outcome for t in first.trials] == ["kept"] * tried


@pytest.mark.parametrize(
    ("quantize", "skipped"),
    [
        ("{}", {"rtn": True, "gptq": False}),  # another method may store more, as rotation does
        ("{keep_float_auto: {max_error: 0.01}}", {"rtn": False, "gptq": False}),
        ("{weights: {bits: 4, granularity: group, group_size: 8}}", {"rtn": False, "gptq": False}),
    ],
)
def test_a_candidate_is_skipped_only_where_its_files_are_surely_larger(
    recipe: Path, quantize: str, skipped: dict[str, bool]
) -> None:
    asked = recipe_file.read(recipe, [f"quantize={quantize}"])
    bench = SimpleNamespace(recipe=asked, kept=lambda one: ("a",) if one.finer else ())
    large = Trial(Candidate(0, ("rtn",)), "rtn", "stopped", size=2_000_000)
    for method, expected in skipped.items():
        candidate = Candidate(0, (method,), finer=0.5)
        why = search._find_smaller_excess(bench, candidate, [large], most=1e6)  # type: ignore[arg-type]
        assert bool(why) == expected


def test_a_smaller_model_is_judged_against_the_whole_one(
    recipe: Path, store: Path, result: Result
) -> None:
    """All drops are allowed, so that the smallest wins; its recipe makes the same model."""
    over = ["search.over={method: [rtn], precision: recipe, size: [0.75]}", "validate.max_drop=0.9"]
    over.append("reduce=null")  # as a recipe may say that it has none
    smaller = search.run(recipe_file.read(recipe, over), store)
    whole, part = smaller.trials
    assert (whole.candidate.size, part.candidate.size) == (1.0, 0.75)
    assert part.size < whole.size == result.trials[0].size
    assert (part.drop or 0.0) > 10 * abs(whole.drop or 1.0)
    assert smaller.winner == part
    assert smaller.chosen is not None
    file = recipe.with_name("smaller.yaml")
    chosen_recipe.write(recipe, over, part.candidate.target, smaller.chosen, file)
    run = Store(store, until="validate")
    pipeline.run(recipe_file.read(file), run)
    assert {step["what"] for step in run.log} == {"reused"}


def test_a_search_whose_steps_are_half_finished_ends_the_same(
    recipe: Path, store: Path, result: Result
) -> None:
    for stage in ("judged", "lower"):
        shutil.rmtree(next(p for p in sorted((store / stage).iterdir()) if p.is_dir()))
    again = search.run(recipe_file.read(recipe), store)
    assert (again.trials, again.pareto) == (result.trials, result.pareto)


def test_a_form_on_which_a_library_fails_is_refused_and_the_search_goes_on(
    recipe: Path, store: Path, result: Result
) -> None:
    """gptq runs out of memory; a full disk ends the search, since it would refuse every
    candidate."""

    class Failing(Workbench):
        error: Exception = MemoryError("17 GB")

        def build(self, candidate: Candidate) -> BuiltCandidate:
            if candidate != self.first:
                raise self.error
            return super().build(candidate)

    first, other = (t.candidate for t in result.trials)
    bench = Failing(recipe_file.read(recipe), store, first)
    assert bench.try_(other, first).why == "MemoryError: 17 GB"
    bench.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left"):
        bench.try_(other, first)


@pytest.mark.parametrize(("own", "verdict"), [("pass", "fail"), ("inconclusive", "pass")])
def test_a_form_slower_than_the_recipe_is_found_only_where_the_recipe_misses_the_margin(
    recipe: Path, store: Path, tmp_path: Path, result: Result, own: str, verdict: str
) -> None:
    class Slow(Workbench):
        def judge(self, built: BuiltCandidate, part: str, alpha: float) -> dict[str, Any]:
            return {"verdict": own if built.candidate == self.first else "pass", "gates": []}

        def race(self, *systems: Any, **options: Any) -> dict[str, Any]:
            return {"to_recipe": {"median": 1.5, "interval": [1.4, 1.6]}}

    first, other = result.trials
    bench = Slow(recipe_file.read(recipe, ["search.objective=latency"]), store, first.candidate)
    bench.prepare()
    progress = Progress(tmp_path, "tiny", "", lambda: 0.0, 0.0)
    assert search._confirm(bench, other, 0.01, {}, True, progress)[0] == verdict


def test_a_form_whose_ledger_ends_validate_makes_room_for_the_next(
    recipe: Path, store: Path, result: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(recipe: Recipe, store: Store) -> pipeline.Outcome:
        if store.until == "validate":
            raise LedgerError("hop lower moves the output by 0.3; allowed: 0.1")
        return pipeline_run(recipe, store)

    pipeline_run = pipeline.run
    monkeypatch.setattr(pipeline, "run", run)
    again = search.run(recipe_file.read(recipe), store)
    kept = [t.label for t in result.trials if t.outcome == "kept"]
    assert sorted(c.candidate.label for c in again.confirmations) == sorted(kept)
    assert {(c.verdict, c.why) for c in again.confirmations} == {
        ("fail", "hop lower moves the output by 0.3; allowed: 0.1")
    }


@pytest.mark.parametrize(("high", "sure"), [(0.98, True), (1.2, False), (None, False)])
def test_a_winner_whose_interval_reaches_the_recipes_time_is_not_called_faster(
    result: Result, high: float | None, sure: bool
) -> None:
    won = (Confirmation(replace(result.trials[1]), "pass"),)
    raced = {"to_recipe": {"median": 0.93, "interval": [0.9, high]}}
    shown = report.write_conclusion(replace(result, confirmations=won, raced=raced), {"found": "x"})
    assert ("not surely faster" not in shown[0]) is sure


def test_a_search_that_tried_few_candidates_does_not_say_that_none_is_good(result: Result) -> None:
    failed = replace(result, verdict="fail", chosen=None, trials=result.trials[:1])
    (sentence,) = report.write_conclusion(replace(failed, confirmations=()), {})
    assert sentence.startswith("None of the 1 of 2 candidates that were tried keeps")


def test_a_recipe_found_without_a_trial_of_others_is_not_called_the_best(result: Result) -> None:
    own = result.trials[0]
    short = replace(result, trials=(own,), confirmations=(Confirmation(own, "pass"),))
    shown = report.write_conclusion(short, {"found": "x"})[0]
    assert shown.startswith("Found: the recipe itself, the best of 1 of 2 candidates.")


def test_a_search_that_ended_after_its_budget_says_what_took_longer(result: Result) -> None:
    late = replace(result, over="confirming rtn took 90 s, and up to 30 s were predicted")
    shown = report.write_text(late, report.build_document(late, None, Path("x")))
    assert "ended after search.budget.hours: confirming rtn took 90 s" in shown


def test_the_report_has_every_form_and_its_figures(result: Result) -> None:
    document = report.build_document(result, Path("found.yaml"), Path("report.html"))
    page = report.write_page(result, json.loads(json.dumps(document)))
    for shown in (report.write_text(result, document), page):
        for trial in result.trials:
            assert trial.label in shown
            assert f"{trial.drop:.4f}" in shown
    assert "<svg" in page
    assert "optimize run found.yaml" in page


def test_the_page_names_the_modules_in_which_a_form_takes_its_time(result: Result) -> None:
    slow, fast = (
        replace(trial, ratio=ratio, ratio_interval=(ratio, ratio), modules=modules)
        for trial, ratio, modules in zip(
            result.trials,
            (1.0, 0.8),
            ({"q": 1.0, "k": 2.0, "": 0.5}, {"q": 0.4, "k": 1.9, "": 0.6}),
            strict=True,
        )
    )
    won = replace(result, trials=(slow, fast), confirmations=(Confirmation(fast, "pass"),))
    page = report.write_page(
        won, report.build_document(won, Path("found.yaml"), Path("report.html"))
    )
    assert "most in q (+0.600 ms), k (+0.100 ms)" in page
    assert page.index(">q<") < page.index(">k<") < page.index(">all modules<")
    untimed = report.write_page(result, report.build_document(result, None, Path("report.html")))
    assert "Time by module" not in untimed


def test_a_form_that_takes_half_the_time_costs_half(result: Result) -> None:
    """Batches of one answer, 36 ms each: 100,000 an hour. A time of the other one that was measured
    at another load does not count."""
    slow = replace(result.trials[0], p50=36.0, ratio=1.0, ratio_interval=(1.0, 1.0))
    fast = replace(result.trials[1], p50=90.0, ratio=0.5, ratio_interval=(0.4, None))
    priced = replace(result, trials=(slow, fast), price=0.2)
    assert result.recipe.validate_.latency.batch[0] == 1
    document = report.build_document(priced, None, Path("x"))
    assert [t["cost_per_million"] for t in document["trials"]] == pytest.approx([2.0, 1.0])
    low, high = document["trials"][1]["rate"]["interval"]
    assert (low, high) == (None, pytest.approx(100_000 / 3600 / 0.4))
    assert "cost of a million answers" in report.write_text(priced, {"found": "x"})
    assert "cost of a million answers" not in report.write_text(result, {"found": "x"})


def test_a_search_for_throughput_times_the_largest_batch_and_names_the_unit(
    recipe: Path, store: Path, result: Result, tmp_path: Path
) -> None:
    overrides = ["search.objective=cost_per_million", "validate.latency.batch=[1,4]"]
    overrides += ["validate.latency.max_seconds=0", "search.over.method=[rtn]"]
    arguments = ["search", str(recipe), "--store", str(store), "--artifacts", str(tmp_path)]
    for one in overrides:
        arguments += ["--set", one]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 2
    assert "needs --price-per-hour" in " ".join(refused.output.split())
    found = recipe.with_name("throughput.yaml")
    done = CliRunner().invoke(main, [*arguments, "--price-per-hour", "0.2", "--out", str(found)])
    assert done.exit_code == 0
    document = json.loads((tmp_path / "tiny.search" / "search.json").read_text())
    (first,) = document["trials"]
    assert first["rate"]["value"] == pytest.approx(4000 / first["p50"])
    assert "cost of a million answers at batch 4 and 0.2 per hour" in found.read_text()
    again = recipe_file.read(found)
    assert again.validate_.latency.batch == (1, 4)


@pytest.mark.parametrize(("batch", "why"), [([1], "its p99 is at least 9 ms"), ([1, 4], "")])
def test_a_limit_on_p99_stops_a_trial_only_where_its_cell_is_timed(
    recipe: Path, tmp_path: Path, batch: list[int], why: str
) -> None:
    over = ["search.objective=throughput", "search.constraints={latency.p99_ms: 5}"]
    asked = recipe_file.read(recipe, [*over, f"validate.latency.batch={batch}"])
    bench = Workbench(asked, tmp_path, Candidate(0, ("rtn",)))
    raced = {"batch": max(batch), "systems": {"candidate": {"p99_interval": [9.0, None]}}}
    built: Any = SimpleNamespace(recipe=derive_recipe(asked, bench.first))
    assert bench._too_slow(built, raced).partition(";")[0] == why


def test_energy_is_refused_with_what_measures_it(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="run `optimize measure` on the bundles"):
        recipe_file.read(recipe, ["search.objective=energy"])


def test_a_price_is_a_number_and_is_refused_where_nothing_is_timed(recipe: Path) -> None:
    for price, words in (("nan", "not a finite number"), ("1", "the search minimises size")):
        done = CliRunner().invoke(main, ["search", str(recipe), "--price-per-hour", price])
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())


def test_too_few_rows_are_refused_with_how_many_are_needed(tmp_path: Path, tiny_bert: Path) -> None:
    recipe = write(tmp_path, tiny_bert)
    write_rows(tmp_path / "evaluate.jsonl", 60, seed=2)
    with pytest.raises(DataError, match=r"60 rows; .* \(30\)") as refused:
        search.run(recipe_file.read(recipe), tmp_path / "store")
    assert refused.value.accepted == "about 100 rows"


def test_the_recipe_found_lies_beside_the_recipe(tmp_path: Path) -> None:
    chosen_recipe.check_place(tmp_path / "recipe.yaml", tmp_path / "found.yaml")
    with pytest.raises(RecipeError, match="another folder"):
        chosen_recipe.check_place(tmp_path / "recipe.yaml", tmp_path / "other" / "found.yaml")


@pytest.mark.parametrize("met", [True, False])
def test_the_best_settings_of_the_winners_server_stand_in_its_recipe(
    recipe: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, met: bool
) -> None:
    """Tuning and the load test are replaced by results; the server with these settings starts."""
    trial = {"settings": {"rows": 8}, "met": 90.0, "missed": 99.0}
    tuned = {"serve": {"rows": 2, "max_wait": 0.5}, "highest_rate": {"met": 210.0}}
    tuned |= {"verdict": "pass" if met else "fail", "trials": [trial]}
    monkeypatch.setattr(tuned_server, "tune", lambda server: tuned)
    loaded = {"highest_rate": {"met": 205.0, "missed": 220.0}}
    monkeypatch.setattr(measure, "measure", lambda *arguments: loaded)
    over = [f"slo={{p99_ms: 5, max_refused: {float(met)}}}", "serve={rows: 8, delay_ms: 1}"]
    over.append("search.over.server=true")
    served = search.run(recipe_file.read(recipe, over), store)
    shown = " ".join(report.write_text(served, {"found": "x"}).split())
    assert "Requests a second" in report.write_page(
        served, report.build_document(served, None, recipe)
    )
    if not met:
        assert (served.exit_code, served.chosen) == (3, None)
        assert "Its server misses section slo" in shown
        return
    assert served.chosen is not None
    assert served.winner is not None
    assert "Server: rows 2, max_wait 0.5; 210 requests a second meet slo, with rows 8 90." in shown
    file = recipe.with_name("served.yaml")
    chosen_recipe.write(recipe, over, served.winner.candidate.target, served.chosen, file)
    again = recipe_file.read(file)
    assert again.serve is not None
    assert again.serve.model_dump(exclude_none=True) == {"rows": 2, "delay_ms": 1, "max_wait": 0.5}
    run = Store(store, until="slo")
    pipeline.run(again, run)
    assert {step["what"] for step in run.log} == {"reused"}


def test_settings_of_a_server_need_objectives(recipe: Path) -> None:
    with pytest.raises(RecipeError, match="no section slo"):
        recipe_file.read(recipe, ["search.over.server=true"])


@pytest.fixture(scope="module")
def runner(recipe: Path, shared_folder: Path) -> Iterator[Runner]:
    file = recipe.with_name("per_module.yaml")
    file.write_text(recipe.read_text().replace("precision: recipe", "precision: per_module"))
    started = Runner(file, shared_folder, search=True)
    yield started
    started.close()


def document(home: Path) -> dict[str, Any]:
    """The search's document, without the time it took and its place."""
    read = json.loads((home / "artifacts" / "tiny.search" / "search.json").read_text())
    return {name: value for name, value in read.items() if name not in ("seconds", "report")}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_killed_search_ends_the_same(runner: Runner, tmp_path: Path, seed: int) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert runner.run(whole) == 0
    random_, kills, before = random.Random(seed), 0, dict[str, int]()
    for stage in STAGES:
        kills += runner.run(killed, stage, 0.05 * random_.random()) == -9
        after = finished(killed)
        assert {k: after[k] for k in before} == before, "a finished step was redone"
        before = after
    assert kills >= len(STAGES) // 2
    assert runner.run(killed) == 0
    assert document(killed) == document(whole)


@pytest.mark.slow
def test_a_decoder_is_judged_by_windows_of_text(tmp_path: Path, tiny_llama: Path) -> None:
    for name, count in (("calibrate", 60), ("evaluate", 300), ("time", 10)):
        (tmp_path / f"{name}.txt").write_text("\n".join(sentences(count, len(name))))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(DECODER.format(model=tiny_llama))
    result = search.run(recipe_file.read(recipe), tmp_path / "store")
    assert {t.label.split(",")[1] for t in result.trials} == {
        *(f" {share:.0%} of weights int8" for share in (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)),
        " onnxruntime-cpu",
    }
    best, least = (next(t for t in result.trials if t.candidate.finer == x) for x in (0.5, 0.0))
    assert (best.drop or 0.0) < (least.drop or 0.0)
    assert result.rows["held_out"] > 20
