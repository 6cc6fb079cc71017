"""Limits come from runs of this model, made once and the same each time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.validate.ledger.limits import monte_carlo
from optimizer.validate.ledger.limits.monte_carlo import RoundedModel
from optimizer.validate.ledger.limits.spread import compare_runs
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
    rounded = RoundedModel(proven.simulated_model, proven.modules, arithmetic)
    others = monte_carlo.make_runs(rounded, batches, proven.compared, range(77, 81))
    traces = [proven.simulated_traces[i] for i in chosen]
    for run in others:
        assert not compare_runs(spread.limits, run, traces, list(spread.limits))[2]


@pytest.mark.parametrize("model", ["encoder", "decoder"])
def test_the_limit_of_one_example_is_about_that_of_the_sample(
    model: str, runs: dict[str, Run], decoder_runs: dict[str, Run]
) -> None:
    m = (runs["static"] if model == "encoder" else decoder_runs["rtn"]).materials()
    spread = m.correct.graph_outputs("state", "fp32")
    assert spread.limit_alone is not None
    traces = m.samples.with_continuations(m.simulated_traces, m.model / "model.onnx")
    names = list(spread.limits)  # of a decoder the logits, and each layer's keys and values
    for one in (traces[1], traces[-1]):  # a decoder's last one continues a KV cache
        for name in {names[0], names[-1]}:
            usual = float(np.square(one.result[name]).mean())
            alone = spread.limit_alone(one.alone(len(one.mask) - 1), name, usual)
            assert spread.limits[name] / 20 < alone < 20 * spread.limits[name]


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
