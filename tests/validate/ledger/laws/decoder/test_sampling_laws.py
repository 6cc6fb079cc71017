"""Tokens are drawn as by transformers' processors, and each fault of the draw is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.generate import loop, row, sampling
from optimizer.harness.generate.options import Options
from optimizer.validate.ledger.laws.decoder import sampling_laws
from tests.harness.tiny_decoder import contract

ADVISED = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.mark.parametrize("vocabulary", [30, 320, 5000])
@pytest.mark.parametrize("defaults", [{}, ADVISED])
def test_the_harness_draws_as_transformers_does(vocabulary: int, defaults: dict[str, Any]) -> None:
    assert sampling_laws.find_problems(contract(vocabulary, defaults=defaults)) == []


def temperature_twice(patch: pytest.MonkeyPatch) -> None:
    once = sampling.shape_scores

    def twice(scores: Any, how: Any) -> Any:
        return once(scores / np.float32(how.temperature), how)

    patch.setattr(sampling, "shape_scores", twice)


def temperature_twice_in_the_options(patch: pytest.MonkeyPatch) -> None:
    decided = Options.sampling

    def squared(self: Any, advised: Any) -> Any:
        made = decided(self, advised)
        return replace(made, temperature=made.temperature**2)

    patch.setattr(Options, "sampling", squared)


def scores_cooled_in_the_loop(patch: pytest.MonkeyPatch) -> None:
    add = row.RowState.add

    def cooled(self: Any, scores: Any) -> Any:
        return add(self, scores / np.float32(self.rules.sampling.temperature))

    patch.setattr(row.RowState, "add", cooled)


def top_k_of_one_more(patch: pytest.MonkeyPatch) -> None:
    keep = sampling.keep_top_k
    patch.setattr(sampling, "keep_top_k", lambda scores, k: keep(scores, k + 1))


def top_p_a_little_wider(patch: pytest.MonkeyPatch) -> None:
    keep = sampling.keep_top_p
    patch.setattr(sampling, "keep_top_p", lambda scores, p: keep(scores, min(p + 0.01, 1)))


def min_p_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sampling, "keep_min_p", lambda scores, p: scores)


def prompt_not_penalized(patch: pytest.MonkeyPatch) -> None:
    penalize = sampling.penalize
    patch.setattr(
        sampling,
        "penalize",
        lambda scores, seen, penalty: penalize(scores, set(seen) - {1, 2, 3, 7, 9}, penalty),
    )


def another_batch_row(patch: pytest.MonkeyPatch) -> None:
    first = loop.prefill
    patch.setattr(loop, "prefill", lambda *given: first(*given)[::-1])


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (temperature_twice, "temperature 0.6"),
        (temperature_twice_in_the_options, "temperature 0.6"),
        (scores_cooled_in_the_loop, "temperature 0.6"),
        (top_k_of_one_more, "top_k 20"),
        (top_p_a_little_wider, "top_p 0.8"),
        (min_p_left_out, "min_p 0.02"),
        (prompt_not_penalized, "repetition_penalty 1.3"),
        (another_batch_row, "do_sample True"),
    ],
)
def test_a_fault_of_the_distribution_is_named_by_its_option(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None], options: str
) -> None:
    fault(monkeypatch)
    found = sampling_laws.find_problems(contract(320))
    assert any(problem.partition(":")[0].endswith(options) for problem in found), found
