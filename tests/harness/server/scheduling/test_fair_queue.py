"""The order of waiting jobs, without a scheduler."""

import pytest

from optimizer.harness.server.scheduling.fair_queue import FairQueue, Job, Refused


def queue_of(*jobs: Job) -> FairQueue[Job]:
    queue = FairQueue[Job]()
    for job in jobs:
        queue.push(0.0, job, 1.0)
    return queue


def run_all(queue: FairQueue[Job]) -> list[Job]:
    order = []
    while jobs := queue.front():
        queue.start(jobs)
        order += jobs
    return order


def test_lower_priority_numbers_run_first() -> None:
    low, high = Job(priority=1), Job(priority=0)
    assert run_all(queue_of(low, high)) == [high, low]


def test_clients_take_turns_whatever_the_order_of_arrival() -> None:
    flood, light = [Job(client="a") for _ in range(3)], Job(client="b")
    assert run_all(queue_of(*flood, light)) == [flood[0], light, *flood[1:]]


def test_a_client_that_comes_later_gets_no_credit_for_the_time_before() -> None:
    queue = queue_of(*(Job(client="a") for _ in range(4)))
    for _ in range(2):
        queue.start(queue.front())
    late = [Job(client="b") for _ in range(3)]
    for job in late:
        queue.push(0.0, job, 1.0)
    assert [job.client for job in run_all(queue)] == ["b", "a", "b", "a", "b"]


def test_the_front_is_one_bucket_up_to_the_rows_asked_for() -> None:
    first, other = Job(bucket=1, rows=2), Job(bucket=2)
    second, third = Job(bucket=1), Job(bucket=1)
    queue = queue_of(first, other, second, third)
    assert queue.front(3) == [first, second]
    assert queue.front(3) == [first, second]  # looking removes none
    queue.remove(first)
    assert queue.front(3) == [other]
    assert (queue.rows, queue.seconds(), len(queue)) == (3, 3.0, 3)


def test_seconds_count_the_jobs_of_a_priority_and_those_before_it() -> None:
    assert queue_of(Job(priority=0), Job(priority=2)).seconds(1) == 1.0


def test_above_the_limit_a_client_within_its_share_is_accepted_up_to_twice_the_limit() -> None:
    queue = queue_of(*(Job(client="a") for _ in range(3)))
    queue.refuse_overload("a", 2.0, 2.0)
    queue.refuse_overload("b", 3.0, 2.0)
    queue.refuse_overload("a", 3.0, 2.0, admitted=True)
    for client, wait in (("a", 3.0), ("b", 5.0)):
        with pytest.raises(Refused, match="overload"):
            queue.refuse_overload(client, wait, 2.0)
