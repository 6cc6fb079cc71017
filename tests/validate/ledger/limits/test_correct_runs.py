"""Limits come from runs of this model, made once and the same each time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from optimizer.foundation.rounding.random_rounding import RandomRounding
from optimizer.validate.ledger.limits import monte_carlo
from optimizer.validate.ledger.limits.spread import against
from optimizer.validate.materials import Materials
from tests.validate.runs import Run


@pytest.fixture(scope="module")
def proven(runs: dict[str, Run]) -> Materials:
    return runs["static"].materials()


def test_two_of_the_same_model_give_the_same_limits(
    proven: Materials, runs: dict[str, Run]
) -> None:
    again = runs["static"].materials().correct.graph_outputs("state", "fp32")
    assert proven.correct.graph_outputs("state", "fp32") == again


def test_another_correct_run_is_within_them(proven: Materials) -> None:
    spread = proven.correct.graph_outputs("state", "fp32")
    chosen = proven.sampled
    batches = [proven.batches[i] for i in chosen]
    arithmetic = proven.correct.arithmetic("fp32")
    rounding = RandomRounding(arithmetic, seed=77)
    others = monte_carlo.runs(
        proven.simulated_model, batches, proven.compared, proven.modules, rounding, 4
    )
    traces = [proven.simulated_traces[i] for i in chosen]
    for run in others:
        assert not against(spread.limits, run, traces, list(spread.limits))[2]


def test_coarser_arithmetic_is_given_more_room(proven: Materials) -> None:
    fine, coarse = (proven.correct.module_inputs("folded", p) for p in ("fp32", "fp16"))
    assert set(fine) == set(coarse)
    assert all(coarse[name] > 100 * fine[name] for name in fine)


def test_each_linear_module_and_each_output_has_a_limit_of_its_own(proven: Materials) -> None:
    limits = proven.correct.module_inputs("state", "fp32")
    assert {f"{name}:input:0" for name in proven.modules} | set(proven.compared) == set(limits)


def test_what_was_folded_beforehand_is_moved_and_nothing_else(runs: dict[str, Run]) -> None:
    m = runs["smooth"].materials()
    assert set(m.correct.arithmetic("fp32", "folded").replaced) == set(m.state.replaced)
    plain = m.correct.arithmetic("fp32")
    assert plain == replace(plain, replaced={})
