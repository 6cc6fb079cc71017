"""Progress of a search over kills: its time, and candidates that end the process."""

from __future__ import annotations

from pathlib import Path

from optimizer.search import chosen_recipe
from optimizer.search.candidates import Candidate
from optimizer.search.progress import Progress


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


def test_no_trial_starts_that_would_leave_no_time_for_a_confirmation(tmp_path: Path) -> None:
    clock, recipe, other = Clock(), Candidate(0, ("rtn",)), Candidate(0, ("gptq",))
    progress = start(tmp_path, clock)
    progress.begin("rtn")
    clock.now += 50
    progress.end(1)
    progress.reserve(recipe, 30.0)
    assert progress.find_want_of_time(131) == ""
    assert "trial took up to 50 s" in progress.find_want_of_time(129)
    assert "trial took up to 50 s" in start(tmp_path, clock).find_want_of_time(129), "resumed"
    assert progress.find_want_of_confirmation(other, 81) == ""
    assert "takes about 30 s" in progress.find_want_of_confirmation(other, 79)
    assert progress.find_want_of_confirmation(recipe, 79) == ""


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
