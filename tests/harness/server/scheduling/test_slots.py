"""The scheduler of text generation, on a virtual clock."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from optimizer.harness.server.scheduling.fair_queue import Refused
from optimizer.harness.server.scheduling.slots import (
    GenerationJob,
    ScheduledStep,
    SlotCosts,
    SlotLimits,
    SlotScheduler,
    cut_pieces,
)

READ, FIXED, EACH = 0.004, 0.010, 0.002  # seconds of a prompt's token, of a step, of its texts
COSTS = SlotCosts(lambda tokens: READ * tokens, lambda texts: FIXED + EACH * texts)
PIECE, WHOLE = 32, 512
PIECE_SECONDS, STEP_SECONDS = READ * (PIECE + 1), FIXED + 4 * EACH


@dataclass
class Simulation:
    """A worker of a scheduler, and texts that end after `lengths` tokens."""

    limits: SlotLimits = field(default_factory=lambda: SlotLimits(4, 1000, 30.0, PIECE))
    now: float = 0.0
    first: dict[GenerationJob, float] = field(
        default_factory=dict
    )  # when each had its first token ...
    done: dict[GenerationJob, float] = field(default_factory=dict)  # ... and its last
    expired: dict[GenerationJob, float] = field(default_factory=dict)
    most: int = 0
    tokens: dict[GenerationJob, int] = field(default_factory=dict)
    turns: list[ScheduledStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = SlotScheduler(self.limits, COSTS, WHOLE)
        self.lengths: dict[GenerationJob, int] = {}

    def ask(
        self, prompt: int, answer: int, length: int | None = None, **of: float | str
    ) -> GenerationJob:
        job = GenerationJob(prompt, answer, **of)  # type: ignore[arg-type]
        self.lengths[job] = answer if length is None else length
        self.scheduler.submit(self.now, [job])
        return job

    def turn(self) -> ScheduledStep:
        turn = self.scheduler.schedule(self.now)
        self.turns.append(turn)
        self.expired |= dict.fromkeys(turn.expired, self.now)
        self.most = max(self.most, self.scheduler.active)
        if turn.prefill:
            job, start, stop = turn.prefill
            self.now += COSTS.prefill(stop - start)
            if stop < job.prompt:
                self.scheduler.postprocess([])
                return turn
        elif turn.decode:
            self.now += COSTS.decode(len(turn.decode))
        ended = []
        for job in turn.jobs:
            self.tokens[job] = self.tokens.get(job, 0) + 1
            self.first.setdefault(job, self.now)
            if self.tokens[job] == self.lengths[job]:
                self.done[job] = self.now
                ended.append(job)
        self.scheduler.postprocess(ended)
        return turn

    def run(self, until: Callable[[], bool] | None = None) -> None:
        while len(self.scheduler) and not (until and until()):
            self.turn()


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 512, 513, 514, 1025])
def test_a_prompt_is_read_whole_and_cut_where_predict_cuts_it(length: int) -> None:
    parts = cut_pieces(length, PIECE, WHOLE)
    assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
    assert parts[-1][1] == length
    assert set(range(WHOLE, length, WHOLE)) <= {start for start, _ in parts}
    ones = [start for start, stop in parts if stop - start == 1]
    assert ones == [n for n in range(0, length, WHOLE) if n == length - 1]


def test_a_text_has_its_slot_until_its_last_token_and_no_more_run_than_there_are() -> None:
    simulation = Simulation()
    jobs = [simulation.ask(random.Random(i).randint(1, 90), 20) for i in range(30)]
    simulation.run()
    assert set(simulation.done) == set(jobs)
    assert simulation.most == 4
    assert all(simulation.tokens[job] == 20 for job in jobs)


def test_a_late_joiner_waits_for_one_step_and_its_own_prompt() -> None:
    simulation = Simulation()
    for _ in range(3):
        simulation.ask(10, 500)
    simulation.run(lambda: len(simulation.first) == 3)
    asked, late = simulation.now, simulation.ask(PIECE, 5)
    simulation.run(lambda: late in simulation.first)
    assert simulation.first[late] - asked <= PIECE_SECONDS + STEP_SECONDS


def test_texts_that_run_wait_for_one_piece_between_two_tokens() -> None:
    simulation = Simulation()
    runs = simulation.ask(10, 200)
    simulation.run(lambda: runs in simulation.first)
    for _ in range(3):
        simulation.ask(300, 5)
    times = []
    while runs not in simulation.done:
        if runs in simulation.turn().decode:
            times.append(simulation.now)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert max(gaps) <= PIECE_SECONDS + STEP_SECONDS + 1e-9


def test_a_client_that_leaves_frees_its_slot_at_the_next_turn() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    first, second = simulation.ask(10, 10_000), simulation.ask(10, 5)
    simulation.run(lambda: simulation.tokens.get(first, 0) == 3)
    assert not simulation.scheduler.abort(first)
    turn = simulation.turn()
    assert turn.aborted == [first]
    assert turn.prefill is not None
    assert turn.prefill[0] is second
    simulation.run()
    assert set(simulation.done) == {second}


def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_slot() -> None:
    simulation = Simulation()
    job = simulation.ask(300, 5)
    simulation.turn()
    simulation.scheduler.abort(job)
    assert simulation.scheduler.active == 0
    assert simulation.turn().aborted == [job]


def test_one_that_leaves_in_the_turn_that_ends_it_is_in_no_other_and_stops_no_reading() -> None:
    simulation = Simulation()
    leaves = simulation.ask(10, 50)
    simulation.turn()
    reads = simulation.ask(300, 5)
    simulation.run(lambda: simulation.turns[-1].jobs == [reads])
    turn = simulation.scheduler.schedule(simulation.now)
    assert turn.decode == [leaves]
    simulation.scheduler.abort(leaves)
    simulation.scheduler.postprocess([leaves])
    simulation.run()
    assert set(simulation.done) == {reads}
    assert not any(turn.aborted for turn in simulation.turns)


def test_one_that_waits_and_leaves_is_never_run() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    first, second = simulation.ask(10, 5), simulation.ask(10, 5)
    assert simulation.scheduler.abort(second)
    simulation.run()
    assert set(simulation.done) == {first}


def test_a_flood_of_one_client_delays_another_by_little() -> None:
    simulation = Simulation(SlotLimits(2, 1000, 1e9, PIECE))
    flood = [simulation.ask(20, 30, client="a") for _ in range(40)]
    simulation.run(lambda: len(simulation.done) == 2)
    other = simulation.ask(20, 30, client="b")
    simulation.run(lambda: other in simulation.done)
    assert sum(job in simulation.done for job in flood) <= 8


def test_priority_goes_first() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    simulation.ask(10, 5)
    low, high = simulation.ask(10, 5, priority=1), simulation.ask(10, 5, priority=0)
    simulation.run()
    assert simulation.first[high] < simulation.first[low]


def test_a_first_token_that_cannot_be_in_time_is_refused_at_once() -> None:
    simulation = Simulation()
    with pytest.raises(Refused, match="deadline"):
        simulation.ask(1000, 5, first=1.0)
    assert len(simulation.scheduler) == 0


def test_a_text_whose_time_is_up_is_ended_and_its_slot_is_free() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    job = simulation.ask(10, 10_000, deadline=1.0)
    simulation.run()
    assert list(simulation.expired) == [job]
    assert simulation.expired[job] <= 1.0 + STEP_SECONDS
    assert simulation.scheduler.active == 0


def test_one_that_waited_too_long_is_not_begun() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    simulation.scheduler.share = 0.0  # answers were short of late: this one is not
    simulation.ask(10, 1000)
    waits = simulation.ask(10, 5, first=2.0)
    simulation.run()
    assert list(simulation.expired) == [waits]
    assert waits not in simulation.first


def test_what_begins_within_the_wait_is_accepted_and_the_rest_refused() -> None:
    limits = SlotLimits(2, 1000, 5.0, PIECE)
    simulation, refused = Simulation(limits), 0
    for _ in range(400):
        try:
            simulation.ask(20, 40)
        except Refused:
            refused += 1
    simulation.run()
    assert refused
    assert max(simulation.first.values()) <= 2 * limits.wait
    assert max(simulation.first.values()) >= limits.wait / 2


def test_what_is_worth_reading_is_accepted_however_much_waits() -> None:
    simulation, outcomes = Simulation(), Counter[str]()
    for _ in range(200):
        for _ in range(20):
            try:
                simulation.scheduler.check("a")
            except Refused:
                outcomes["refused"] += 1
                continue
            simulation.ask(40, 20, client="a")
            outcomes["accepted"] += 1
        simulation.turn()
    assert min(outcomes.values()) > 20


def test_no_more_wait_than_may() -> None:
    simulation = Simulation(SlotLimits(1, 3, 1e9, PIECE))
    for _ in range(3):
        simulation.ask(10, 5)
    with pytest.raises(Refused, match="overload"):
        simulation.ask(10, 5)


def test_jobs_of_one_request_are_accepted_together_or_not_at_all() -> None:
    scheduler = SlotScheduler(SlotLimits(1, 3, 1e9, PIECE), COSTS, WHOLE)
    scheduler.submit(0.0, [GenerationJob(10, 5), GenerationJob(10, 5)])
    with pytest.raises(Refused):
        scheduler.submit(0.0, [GenerationJob(10, 5), GenerationJob(10, 5)])
    assert len(scheduler) == 2


def test_a_drained_scheduler_finishes_what_it_accepted() -> None:
    simulation = Simulation()
    jobs = [simulation.ask(40, 7) for _ in range(9)]
    simulation.turn()
    simulation.scheduler.drain()
    with pytest.raises(Refused, match="draining"):
        simulation.ask(10, 5)
    simulation.run()
    assert set(simulation.done) == set(jobs)


def test_a_text_that_fails_while_its_prompt_is_read_leaves_its_slot() -> None:
    simulation = Simulation(SlotLimits(1, 1000, 1e9, PIECE))
    broken, other = simulation.ask(100, 5), simulation.ask(10, 5)
    turn = simulation.scheduler.schedule(0.0)
    assert turn.prefill is not None
    assert turn.prefill[0] is broken
    simulation.scheduler.postprocess([broken])
    simulation.run()
    assert set(simulation.done) == {other}


def test_answers_that_end_early_shorten_what_is_predicted() -> None:
    simulation = Simulation()
    for _ in range(30):
        simulation.ask(10, 100, length=10)
    simulation.run()
    assert simulation.scheduler.share < 0.3


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_lost_or_run_twice_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    simulation = Simulation(SlotLimits(chance.randint(1, 5), 20, 20.0, PIECE))
    asked, left = list[GenerationJob](), set[GenerationJob]()
    for _ in range(600):
        if chance.random() < 0.15:
            try:
                first = simulation.now + chance.choice([1.0, 5.0, math.inf])
                last = simulation.now + chance.choice([2.0, math.inf])
                client, prompt = str(chance.randint(0, 2)), chance.randint(1, 100)
                asked.append(
                    simulation.ask(
                        prompt, 30, chance.randint(1, 30), client=client, first=first, deadline=last
                    )
                )
            except Refused:
                continue
        if asked and chance.random() < 0.03:
            job = chance.choice(asked)
            if job not in simulation.done and job not in simulation.expired:
                simulation.scheduler.abort(job)
                left.add(job)
        simulation.turn()
    simulation.run()
    ends = [set(simulation.done), set(simulation.expired), left]
    assert sum(map(len, ends)) == len(asked) == len(set.union(*ends))
    assert simulation.scheduler.active == len(simulation.scheduler) == 0
    assert simulation.most <= simulation.limits.slots
