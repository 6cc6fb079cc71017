"""The scheduler under arrivals of any pattern, on a clock that the test moves."""

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness.server.scheduling.batching import BatchJob, BatchLimits, BatchScheduler
from optimizer.harness.server.scheduling.fair_queue import Refused


def job_of(
    bucket: Hashable,
    size: int,
    client: str = "",
    priority: int = 0,
    deadline: float = math.inf,
    rows: int = 1,
) -> BatchJob:
    return BatchJob(
        size, bucket=bucket, client=client, priority=priority, deadline=deadline, rows=rows
    )


LIMITS = BatchLimits(rows=4, delay=0.0, target=1.0, interval=5.0, waiting=100)


def cost(size: int, rows: int) -> float:
    return 0.02 + 0.01 * size * rows


@dataclass
class Run:
    """Outcome of each job: time of its answer, and seconds in the queue."""

    answered: dict[BatchJob, float] = field(default_factory=dict)
    waited: dict[BatchJob, float] = field(default_factory=dict)
    refused: dict[BatchJob, str] = field(default_factory=dict)
    ended: Counter[BatchJob] = field(default_factory=Counter)
    batches: list[list[BatchJob]] = field(default_factory=list)
    most: int = 0
    idle: int = 0


def simulate(
    arrivals: Sequence[tuple[float, BatchJob]],
    limits: BatchLimits = LIMITS,
    actual: Callable[[int, int], float] = cost,
    cancels: Sequence[tuple[float, BatchJob]] = (),
) -> Run:
    """Run a scheduler on a virtual clock. cancels: times at which clients leave."""
    scheduler, run = BatchScheduler(limits, cost), Run()
    came: dict[BatchJob, float] = {}
    events: list[tuple[float, int, str, Any]] = []
    for i, (at, job) in enumerate(arrivals):
        heapq.heappush(events, (at, i, "submit", job))
    for i, (at, job) in enumerate(cancels):
        heapq.heappush(events, (at, len(arrivals) + i, "cancel", job))
    number, running = len(events), 0
    while events:
        now, _, what, job = heapq.heappop(events)
        if what == "submit":
            try:
                scheduler.submit(now, [job])
                came[job] = now
            except Refused as e:
                run.refused[job] = e.reason
        elif what == "cancel" and scheduler.abort(job):
            run.ended[job] += 1
        elif what == "finish":
            scheduler.postprocess(now, job)
            for done in job.jobs:
                run.ended[done] += 1
                run.answered[done] = now
            running -= 1
        run.most = max(run.most, scheduler.waiting.rows)
        if running == limits.workers:
            continue
        turn = scheduler.schedule(now)
        for late in turn.expired:
            run.ended[late] += 1
        number += 1
        if turn.jobs:
            running += 1
            run.batches.append(turn.jobs)
            run.waited |= {job: now - came[job] for job in turn.jobs}
            size, rows = turn.jobs[0].size, sum(j.rows for j in turn.jobs)
            heapq.heappush(events, (now + actual(size, rows), number, "finish", turn))
            heapq.heappush(events, (now, number + 1, "ask", None))  # of another worker
            number += 1
        elif turn.again < math.inf:
            assert turn.again > now
            heapq.heappush(events, (turn.again, number, "ask", None))
        run.idle += not turn.jobs and len(scheduler.waiting) > 0 and running < limits.workers
    return run


def poisson(
    rate: float, seconds: float, seed: int = 0, client: str = ""
) -> list[tuple[float, BatchJob]]:
    chance, at, arrivals = random.Random(seed), 0.0, []
    while (at := at + chance.expovariate(rate)) < seconds:
        size = chance.choice([1, 2, 8])
        arrivals.append((at, job_of(bucket=size, size=size, client=client)))
    return arrivals


jobs = st.builds(
    lambda size, client, priority, slack, rows: (size, client, priority, slack, rows),
    st.sampled_from([1, 2, 8, 30]),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.one_of(st.just(math.inf), st.floats(0.01, 2)),
    st.sampled_from([1, 1, 1, 3, 9]),
)
Pattern = list[tuple[float, tuple[int, str, int, float, int], bool]]
patterns = st.lists(st.tuples(st.floats(0, 1.5), jobs, st.booleans()), max_size=40)
delays = st.sampled_from([0.0, 0.1])
workers = st.sampled_from([1, 2, 3])


def made_of(
    pattern: Pattern, delay: float, workers: int
) -> tuple[list[tuple[float, BatchJob]], list[tuple[float, BatchJob]], BatchLimits]:
    arrivals, cancels = list[tuple[float, BatchJob]](), list[tuple[float, BatchJob]]()
    for at, (size, client, priority, slack, rows), leaves in pattern:
        job = job_of(size, size, client, priority, at + slack, rows)
        arrivals.append((at, job))
        if leaves:
            cancels.append((at + 0.2, job))
    return arrivals, cancels, BatchLimits(4, delay, 1.0, 2.0, 30, workers)


@given(patterns, delays, workers)
def test_each_accepted_job_ends_once_and_no_refused_one_runs(
    pattern: Pattern, delay: float, workers: int
) -> None:
    arrivals, cancels, limits = made_of(pattern, delay, workers)
    run = simulate(arrivals, limits, lambda size, rows: 1.7 * cost(size, rows), cancels)
    accepted = {job for _, job in arrivals} - set(run.refused)
    assert run.ended == Counter(accepted)
    assert run.most <= 30 + 9


@given(patterns, delays, workers)
def test_no_accepted_deadline_is_missed_while_batches_take_what_was_predicted(
    pattern: Pattern, delay: float, workers: int
) -> None:
    arrivals, cancels, limits = made_of(pattern, delay, workers)
    run = simulate(arrivals, limits, cost, cancels)
    left = {job for _, job in cancels}
    assert all(at <= job.deadline + 1e-9 for job, at in run.answered.items())
    assert {job for _, job in arrivals} - set(run.refused) - left <= set(run.answered)


@given(patterns, delays, workers)
def test_a_batch_is_of_one_bucket_and_no_larger_than_allowed(
    pattern: Pattern, delay: float, workers: int
) -> None:
    arrivals, cancels, limits = made_of(pattern, delay, workers)
    for batch in simulate(arrivals, limits, cost, cancels).batches:
        assert len({job.bucket for job in batch}) == 1
        assert sum(job.rows for job in batch) <= 4 or len(batch) == 1


@given(patterns, workers)
def test_without_a_delay_no_worker_rests_while_jobs_wait(pattern: Pattern, workers: int) -> None:
    arrivals, cancels, limits = made_of(pattern, 0.0, workers)
    assert simulate(arrivals, limits, cost, cancels).idle == 0


def test_a_job_that_cannot_make_its_deadline_is_refused_at_once() -> None:
    long, short = job_of(1, 30, deadline=10), job_of(2, 1, deadline=0.2)
    assert simulate([(0.0, long), (0.01, short)]).refused == {short: "deadline"}
    early = job_of(2, 1, deadline=0.4)
    assert simulate([(0.0, long), (0.01, early)]).refused == {}


def test_an_urgent_job_goes_before_others_that_have_time() -> None:
    first, patient = job_of(0, 8), [job_of(1, 8) for _ in range(3)]
    urgent = job_of(2, 8, priority=5, deadline=0.25)
    run = simulate([(0.0, j) for j in (first, *patient, urgent)])
    assert run.batches == [[first], [urgent], patient]


def test_urgent_jobs_that_make_it_only_together_run_together() -> None:
    first, patient = job_of(0, 8), job_of(1, 8)
    urgent = [job_of(2, 8, priority=5, deadline=0.29) for _ in range(2)]
    run = simulate([(0.0, j) for j in (first, patient, *urgent)])
    assert run.batches == [[first], urgent, [patient]]


def test_an_urgent_job_is_not_lost_while_others_wait_for_more_rows() -> None:
    limits = BatchLimits(rows=4, delay=0.1, target=1.0, interval=5.0, waiting=100)
    jobs = [*(job_of(1, 1) for _ in range(4)), job_of(30, 30), *(job_of(1, 1) for _ in range(4))]
    urgent = job_of(1, 1, deadline=0.25)
    run = simulate([(0.0, j) for j in (*jobs, urgent)], limits)
    assert run.answered[urgent] <= 0.25


def test_higher_priority_runs_first_and_equals_in_the_order_of_arrival() -> None:
    first, low, high = job_of(0, 8), [job_of(i, 8, priority=1) for i in (1, 2)], job_of(3, 8)
    run = simulate([(0.0, j) for j in (first, *low, high)])
    assert run.batches == [[first], [high], [low[0]], [low[1]]]


def test_with_a_delay_the_first_row_waits_that_long_for_others_but_a_full_batch_does_not() -> None:
    limits = BatchLimits(rows=2, delay=0.5, target=1.0, interval=5.0, waiting=100)
    alone, pair = job_of(1, 1), [job_of(2, 1), job_of(2, 1)]
    run = simulate([(0.0, alone), (3.0, pair[0]), (3.1, pair[1])], limits)
    assert run.waited == pytest.approx({alone: 0.5, pair[0]: 0.1, pair[1]: 0.0})


def test_under_three_times_the_load_accepted_rows_wait_no_longer_than_the_target() -> None:
    arrivals = poisson(3 * 1 / cost(11 // 3, 1), 60.0)
    run = simulate(arrivals)
    late = [w for job, w in run.waited.items() if run.answered[job] > 20.0]
    assert len(run.refused) > len(arrivals) / 3
    assert set(run.refused.values()) == {"overload"}
    assert max(late) <= 2 * LIMITS.target + cost(8, 4)
    busy = sum(cost(b[0].size, len(b)) for b in run.batches)
    assert busy > 0.99 * 60  # what is refused could not have been served


def test_what_would_be_refused_is_refused_before_it_is_read() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    while True:
        try:
            scheduler.submit(0.0, [job_of(1, 30, "a")])
        except Refused:
            break
        scheduler.admit(0.0, "b")
        scheduler.leave("b")
    with pytest.raises(Refused, match="overload"):
        scheduler.admit(0.0, "a")
    scheduler.drain()
    with pytest.raises(Refused, match="draining"):
        scheduler.admit(0.0, "b")


@pytest.mark.parametrize("size", [1, 8, 30])
def test_as_many_are_admitted_at_one_instant_as_would_be_accepted_one_after_the_other(
    size: int,
) -> None:
    def accepted(*, on_their_way: bool) -> int:
        scheduler = BatchScheduler(LIMITS, cost)
        scheduler.submit(0.0, [job_of(1, size, "a")])
        for _ in range(200):  # until what a request costs of late is known
            scheduler.schedule(0.0)
            scheduler.submit(0.0, [job_of(1, size, "a")])
        for number in range(1000):
            try:
                if on_their_way:
                    scheduler.admit(0.0, "a")
                else:
                    scheduler.submit(0.0, [job_of(1, size, "a")])
            except Refused:
                return number
        raise AssertionError

    assert accepted(on_their_way=True) == accepted(on_their_way=False) > 1


def waiting(jobs: int, size: int) -> BatchScheduler:
    scheduler = BatchScheduler(LIMITS, cost)
    for _ in range(jobs):
        scheduler.submit(0.0, [job_of(1, size, "a")])
    return scheduler


def admitted(scheduler: BatchScheduler, client: str = "b") -> int:
    """Number of requests of this client that are admitted before one is refused."""
    number = 0
    with suppress(Refused):
        while number < LIMITS.waiting:
            scheduler.admit(0.0, client)
            number += 1
    return number


def test_what_was_admitted_is_not_refused_for_the_little_that_came_meanwhile() -> None:
    scheduler = waiting(1, 1)
    for _ in range(10):
        scheduler.admit(0.0, "slow")
    with suppress(Refused):
        while True:
            scheduler.submit(0.0, [job_of(1, 30, "fast")])
    for _ in range(10):
        scheduler.submit(0.0, [job_of(1, 1, "slow")], admitted=True)
    with pytest.raises(Refused, match="overload"):
        scheduler.submit(0.0, [job_of(1, 1, "fast")])


def test_what_asks_for_a_low_priority_is_looked_at_again_as_it_waits_for_more() -> None:
    scheduler = waiting(1, 1)
    for _ in range(2):
        scheduler.admit(0.0, "a")
    with suppress(Refused):
        while True:
            scheduler.submit(0.0, [job_of(1, 30, "a")])
    scheduler.submit(0.0, [job_of(1, 1, "a")], admitted=True)
    with pytest.raises(Refused, match="overload"):
        scheduler.submit(0.0, [job_of(1, 1, "a", priority=1)], admitted=True)


@pytest.mark.parametrize("before", [0, 1])
def test_however_many_were_admitted_no_more_waits_than_twice_what_may(before: int) -> None:
    """As when all clients come at once to a server that has just started."""
    scheduler, limit = waiting(before, 1), 2 * LIMITS.interval
    accepted = Counter[bool]()
    for _ in range(admitted(scheduler)):
        try:
            scheduler.submit(0.0, [job_of(1, 30, "b")], admitted=True)
        except Refused:
            accepted[False] += 1
        else:
            accepted[True] += 1
    assert accepted[False] > 0
    assert limit < accepted[True] * cost(30, 1) + before * cost(1, 1) <= limit + cost(30, 1)


def test_a_large_request_does_not_make_those_of_others_count_as_large() -> None:
    scheduler, usual = waiting(2, 1), waiting(3, 1)
    with pytest.raises(Refused, match="deadline"):
        scheduler.submit(0.0, [job_of(object(), 30_000, "a", deadline=1.0)])
    scheduler.submit(0.0, [job_of(1, 30, "a"), job_of(1, 30, "a")])
    assert admitted(scheduler) > 0.7 * admitted(usual) > 10


def test_those_that_do_not_come_leave_their_places() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    scheduler.submit(0.0, [job_of(1, 30, "a")])
    for _ in range(10 * LIMITS.waiting):
        scheduler.admit(0.0, "b")
        scheduler.leave("b")
    for _ in range(10 * LIMITS.waiting):
        scheduler.admit(0.0, "b")
        scheduler.drain()
        with pytest.raises(Refused, match="draining"):
            scheduler.submit(0.0, [job_of(1, 1, "b")], admitted=True)
        scheduler.draining = False


def test_what_is_worth_reading_is_accepted_however_much_waits() -> None:
    scheduler, chance, outcomes = BatchScheduler(LIMITS, cost), random.Random(0), Counter[str]()
    now = 0.0
    for _ in range(200):
        turn = scheduler.schedule(now)
        for _ in range(20):  # while that batch runs
            try:
                scheduler.admit(now, "a")
            except Refused:
                outcomes["refused"] += 1
                continue
            scheduler.submit(now, [job_of(1, chance.choice([1, 8, 30]), "a")], admitted=True)
            outcomes["accepted"] += 1
        now += turn.predicted
        if turn.jobs:
            scheduler.postprocess(now, turn)
    assert min(outcomes.values()) > 100


def test_a_burst_is_accepted_as_a_whole() -> None:
    burst = [(0.001 * i, job_of(1, 8)) for i in range(40)]
    assert simulate(burst).refused == {}


def test_without_load_nothing_is_refused() -> None:
    run = simulate(poisson(0.6 / cost(11 // 3, 1), 100.0))
    assert run.refused == {}


def test_a_client_that_asks_for_its_share_gets_it_beside_a_flood() -> None:
    flood = poisson(5 / cost(11 // 3, 1), 60.0, client="flood")
    light = poisson(0.2 / cost(11 // 3, 1), 60.0, seed=1, client="light")
    run = simulate(sorted([*flood, *light], key=lambda a: a[0]))
    refused = Counter(job.client for job in run.refused)
    assert refused["light"] <= 0.05 * len(light)
    assert refused["flood"] > 0.5 * len(flood)
    waits = {c: [w for j, w in run.waited.items() if j.client == c] for c in ("light", "flood")}
    assert (
        sorted(waits["light"])[len(waits["light"]) // 2]
        < 0.5 * sorted(waits["flood"])[len(waits["flood"]) // 2]
    )


def test_a_drained_scheduler_runs_what_waits_and_refuses_the_rest() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    waiting = [job_of(1, 1), job_of(2, 1)]
    scheduler.submit(0.0, waiting)
    scheduler.drain()
    with pytest.raises(Refused, match="draining"):
        scheduler.submit(0.0, [job_of(1, 1)])
    ran = []
    while (turn := scheduler.schedule(1.0)).jobs:
        ran += turn.jobs
        scheduler.postprocess(1.0, turn)
    assert ran == waiting


def test_a_request_of_several_jobs_is_accepted_as_a_whole_or_not_at_all() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    scheduler.submit(0.0, [job_of(1, 8)])
    together = [job_of(2, 8, deadline=0.4), job_of(3, 8, deadline=0.4), job_of(4, 8, deadline=0.25)]
    with pytest.raises(Refused, match="deadline"):
        scheduler.submit(0.0, [*together, *(job_of(i, 8, deadline=0.25) for i in (5, 6))])
    assert len(scheduler.waiting) == 1
    scheduler.submit(0.0, together)
    assert len(scheduler.waiting) == 4


def test_batches_that_take_longer_than_predicted_are_expected_to_from_then_on() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    for start in (0.0, 10.0):
        scheduler.submit(start, [job_of(1, 8)])
        turn = scheduler.schedule(start)
        scheduler.postprocess(start + 3 * cost(8, 1), turn)
    assert scheduler.pace == pytest.approx(3.0)
    with pytest.raises(Refused, match="deadline"):
        scheduler.submit(20.0, [job_of(1, 8, deadline=20.0 + 2 * cost(8, 1))])


def test_an_accepted_job_that_is_too_late_after_all_is_handed_back_and_not_run() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    scheduler.submit(0.0, [job_of(1, 8)])
    first = scheduler.schedule(0.0)
    late = job_of(1, 8, deadline=0.5)
    scheduler.submit(0.0, [late])
    scheduler.postprocess(0.45, first)
    turn = scheduler.schedule(0.45)
    assert (turn.jobs, turn.expired) == ([], [late])


def test_nothing_is_kept_of_clients_that_have_left() -> None:
    scheduler = BatchScheduler(LIMITS, cost)
    for i in range(50):
        scheduler.submit(float(i), [job_of(i, 1, client=str(i))])
        scheduler.postprocess(i + cost(1, 1), scheduler.schedule(float(i)))
    held = [*vars(scheduler).values(), *vars(scheduler.waiting).values()]
    sizes = [len(value) for value in held if hasattr(value, "__len__")]
    assert sizes == [0] * len(sizes)


def test_accepting_a_job_looks_at_none_of_those_that_wait() -> None:
    """As long as even all of them together end before any deadline."""

    class Deadline(float):
        looks = 0

        def __lt__(self, other: float) -> bool:
            type(self).looks += 1
            return float(self) < other

    scheduler = BatchScheduler(BatchLimits(8, 0.0, 1e9, 2e9, 10_000), lambda _, rows: 0.001 * rows)
    looks = []
    for waiting in range(200):
        Deadline.looks = 0
        scheduler.submit(0.0, [job_of("b", 8, deadline=Deadline(1e6 + waiting))])
        looks.append(Deadline.looks)
    assert max(looks[1:]) <= 2


def test_two_workers_answer_twice_as_much() -> None:
    arrivals = poisson(3 / cost(11 // 3, 1), 60.0)
    one, two = (len(simulate(arrivals, replace(LIMITS, workers=n)).answered) for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=0.1)


def test_a_free_worker_takes_what_the_other_has_not_begun() -> None:
    jobs = [job_of(i, 8) for i in range(3)]
    run = simulate([(0.0, job) for job in jobs], replace(LIMITS, workers=2))
    assert run.waited == pytest.approx({jobs[0]: 0.0, jobs[1]: 0.0, jobs[2]: cost(8, 1)})
