"""Sampling agrees with the processors of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from optimizer.harness.errors import AnswerError, InputError
from optimizer.harness.generate import Options, sampling
from optimizer.harness.generate.options import Sampling
from tests.conftest import heavy_tailed

ADVISED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9}


def scores(seed: int = 0, size: int = 800) -> Any:
    return heavy_tailed((size,), seed, 3.0).numpy()


def theirs(name: str, *given: Any, ids: list[int] | None = None, of: Any = None) -> Any:
    from transformers.generation import logits_process

    made = getattr(logits_process, name)(*given)
    before = torch.tensor([ids or [0]])
    return made(before, torch.from_numpy(of.copy())[None])[0].numpy()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("draws", [False, True])
def test_scores_that_are_no_numbers_are_no_token(wrong: float, draws: bool) -> None:
    of = np.full_like(scores(), wrong) if wrong < 0 else scores()
    of[5] = wrong
    with pytest.raises(AnswerError, match="output logits"):
        sampling.choose(of, [], Sampling(do_sample=draws), np.random.default_rng(0))


def test_the_coldest_draw_takes_the_likeliest() -> None:
    cold = Sampling(do_sample=True, temperature=1e-39)
    drawn = sampling.choose(scores(), [], cold, np.random.default_rng(0))
    assert drawn == scores().argmax()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("ours", "name", "value"),
    [
        (sampling.keep_top_k, "TopKLogitsWarper", 1),
        (sampling.keep_top_k, "TopKLogitsWarper", 40),
        (sampling.keep_top_k, "TopKLogitsWarper", 10_000),
        (sampling.keep_top_p, "TopPLogitsWarper", 0.0),
        (sampling.keep_top_p, "TopPLogitsWarper", 0.35),
        (sampling.keep_top_p, "TopPLogitsWarper", 0.95),
        (sampling.keep_min_p, "MinPLogitsWarper", 0.02),
        (sampling.keep_min_p, "MinPLogitsWarper", 1.0),
    ],
)
def test_what_is_ruled_out_is_what_transformers_rules_out(
    ours: Any, name: str, value: Any, seed: int
) -> None:
    given = scores(seed)
    np.testing.assert_array_equal(ours(given, value), theirs(name, value, of=given))


def test_the_repetition_penalty_is_theirs_and_counts_a_token_once() -> None:
    given, seen = scores(), [3, 700, 3, 41]
    wanted = theirs("RepetitionPenaltyLogitsProcessor", 1.3, ids=seen, of=given)
    np.testing.assert_allclose(sampling.penalize(given, set(seen), 1.3), wanted, rtol=1e-6)
    assert (sampling.penalize(given, set(seen), 1.3) != given).sum() == 3


def test_all_of_them_come_in_their_order() -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    asked = {"temperature": 0.7, "top_k": 90, "top_p": 0.9, "min_p": 0.03}
    config = LlamaConfig(vocab_size=800, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    wanted_by = LlamaForCausalLM(config)._get_logits_processor(
        GenerationConfig(do_sample=True, repetition_penalty=1.2, **asked), input_ids_seq_length=3
    )
    given = np.random.default_rng(5).normal(size=800).astype(np.float32)
    seen = [1, 2, 600]
    wanted = wanted_by(torch.tensor([seen]), torch.from_numpy(given)[None])[0].numpy()
    made = sampling.shape_scores(sampling.penalize(given, set(seen), 1.2), Sampling(True, **asked))
    kept = np.isfinite(wanted)
    assert 2 < kept.sum() < 90
    np.testing.assert_array_equal(np.isfinite(made), kept)
    np.testing.assert_allclose(made[kept], wanted[kept] - wanted[kept].max(), atol=1e-5)


def test_draws_have_the_probabilities_of_the_scores() -> None:
    given = np.array([1.0, -np.inf, 0.0, 2.0, -1.0], np.float32)
    generator = np.random.default_rng(0)
    times = 4000
    counts = np.bincount([sampling.draw(given, generator) for _ in range(times)], minlength=5)
    assert counts[1] == 0
    kept = [0, 2, 3, 4]
    expected = sampling.softmax(given)[kept] * times
    assert stats.chisquare(counts[kept], expected).pvalue > 1e-3


def test_what_is_not_asked_is_what_the_makers_advise() -> None:
    assert Options().sampling(ADVISED) == Sampling(True, 0.6, 20, 0.9)
    assert Options(top_p=1.0, temperature=0.3).sampling(ADVISED) == Sampling(True, 0.3, 20, 1.0)


def test_a_temperature_asks_for_a_draw_and_zero_for_none() -> None:
    assert Options(temperature=0.8).sampling({}) == Sampling(True, 0.8)
    assert not Options().sampling({}).do_sample
    assert not Options(temperature=0).sampling(ADVISED).do_sample
    assert not Options(do_sample=False).sampling(ADVISED).do_sample


def test_the_penalty_counts_without_a_draw() -> None:
    assert Options(do_sample=False).sampling({"repetition_penalty": 1.1}) == Sampling(
        False, repetition_penalty=1.1
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens.*1 to 1,048,576"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p.*0 to 1"),
        ({"top_k": 2.5}, "top_k"),
        ({"seed": True}, "seed"),
        ({"stop": "END"}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": None}, "stop: None was given"),
        ({"stop": ["x"] * 65}, "up to 64 texts"),
        ({"stop": ["\ud800"]}, r"stop: character 1 is the lone surrogate U\+D800"),
        ({"temperature": 1e-300}, "temperature: 1e-300 was given.*0.0001 to 10,000"),
        ({"temperature": float("inf")}, "temperature"),
        ({"max_new_tokens": None}, "max_new_tokens"),
        ({"seed": 10**30}, r"seed.*2\^63"),
        ({"do_sample": "no"}, "do_sample.*true or false"),
        ({"do_sample": False, "top_k": 5}, "top_k has no effect with do_sample false"),
        ({"max_tokens": 5}, "max_tokens: unknown option.*Maybe you meant max_new_tokens"),
    ],
)
def test_an_option_that_means_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Options.from_json(given)
