"""Perplexity, KL and agreement equal torch's; their gates follow from intervals."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness.contract import Contract
from optimizer.harness.tasks import text_generation
from optimizer.recipe.schema import Validate
from optimizer.validate.decoder import TorchDecoder, compute_logits, generate_greedily
from optimizer.validate.quality import divergence, perplexity

TOKENS, VOCABULARY = 90, 50
DATA = {"source": "text"}


def logits(seed: int, scale: float = 2.0) -> Any:
    return np.random.default_rng(seed).normal(0, scale, (TOKENS, VOCABULARY)).astype(np.float32)


def ids(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, VOCABULARY, TOKENS)


def test_one_window_is_measured_as_torch_measures_it() -> None:
    a, b, tokens = logits(1), logits(2), ids(3)
    found = perplexity.score([tokens], lambda _: a, lambda _: b)
    wanted = torch.from_numpy(tokens[1:])
    p, q = (torch.from_numpy(x[:-1]).double().log_softmax(-1) for x in (a, b))
    loss = torch.nn.functional.nll_loss
    assert found.baseline[0] == pytest.approx(float(loss(p, wanted)))
    assert found.candidate[0] == pytest.approx(float(loss(q, wanted)))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert found.kl[0] == pytest.approx(float(kl))
    assert found.top1[0] == pytest.approx(float((p.argmax(1) == q.argmax(1)).double().mean()))
    assert found.tokens == TOKENS - 1


def test_a_system_against_itself_differs_by_nothing() -> None:
    a = logits(1)
    found = perplexity.score([ids(i) for i in range(3)], lambda _: a, lambda _: a)
    assert (found.added == 0).all()
    assert (found.kl == 0).all()
    assert (found.top1 == 1).all()


def test_each_window_is_compared_with_its_own_baseline() -> None:
    windows = [ids(i) for i in range(5)]
    of = {window.tobytes(): logits(i) for i, window in enumerate(windows)}
    together = perplexity.score(windows, lambda w: of[w.tobytes()], lambda w: of[w.tobytes()])
    assert (together.kl == 0).all()
    alone = [perplexity.measure_nll(of[w.tobytes()], w) for w in windows]
    assert together.baseline.tolist() == alone


def test_a_constant_added_to_all_logits_changes_nothing() -> None:
    a = logits(1)
    found = perplexity.score([ids(2)], lambda _: a, lambda _: a + 7)
    assert found.kl[0] == pytest.approx(0, abs=1e-6)


def scores(added: Any, kl: float = 0.05, top1: float = 0.9) -> perplexity.Scores:
    generator = np.random.default_rng(0)
    base = generator.normal(3, 0.3, len(added))
    noise = generator.normal(0, 0.01, len(added))
    noise -= noise.mean()
    return perplexity.Scores(base, base + added, kl + noise, top1 + noise, 1000)


def around(mean: float, windows: int = 40) -> Any:
    noise = np.random.default_rng(5).normal(0, 0.01, windows)
    return mean + noise - noise.mean()


def judged(found: perplexity.Scores, **options: Any) -> tuple[dict[str, str], dict[str, Any]]:
    wanted = Validate.model_validate(
        {"data": DATA, "metric": "perplexity", "max_drop": 0.05, **options}
    )
    gates, section = perplexity.judge(found, wanted)
    return {g.name: g.verdict for g in gates}, section


@pytest.mark.parametrize(
    ("added", "verdict"),
    [(0.01, "pass"), (0.09, "fail"), (0.0505, "inconclusive"), (-0.2, "pass")],
)
def test_added_nats_are_judged_against_the_margin(added: float, verdict: str) -> None:
    verdicts, section = judged(scores(around(added)))
    assert verdicts == {"quality.perplexity": verdict}
    assert (section["needed"] is not None) == (verdict == "inconclusive")
    low, high = section["difference"]["interval"]
    assert low < section["difference"]["value"] < high
    assert section["difference"]["value"] == pytest.approx(-added, abs=0.01)


def test_perplexities_are_those_of_the_mean_and_lie_in_their_intervals() -> None:
    found = scores(around(0.02))
    _, section = judged(found)
    for name, nll in (("baseline", found.baseline), ("candidate", found.candidate)):
        low, high = section[name]["interval"]
        assert low < section[name]["value"] < high
        assert section[name]["value"] == pytest.approx(np.exp(nll.mean()))


@pytest.mark.parametrize(
    ("options", "verdict"),
    [
        ({"max_kl": 0.1}, {"quality.max_kl": "pass"}),
        ({"max_kl": 0.01}, {"quality.max_kl": "fail"}),
        ({"max_kl": 0.0505}, {"quality.max_kl": "inconclusive"}),
        ({"min_top1": 0.8}, {"quality.min_top1": "pass"}),
        ({"min_top1": 0.95}, {"quality.min_top1": "fail"}),
    ],
)
def test_kl_and_agreement_have_gates_when_the_recipe_asks(
    options: dict[str, float], verdict: dict[str, str]
) -> None:
    verdicts, _ = judged(scores(around(0.0)), **options)
    assert verdicts == {"quality.perplexity": "pass", **verdict}


def test_few_windows_are_inconclusive_and_say_how_many_are_needed() -> None:
    verdicts, section = judged(scores(around(0.0, 5)))
    assert verdicts["quality.perplexity"] == "inconclusive"
    assert section["needed"] >= 20


def test_the_common_start_ends_at_the_first_difference() -> None:
    a = np.array([[1, 2, 3, 4], [1, 2, 3, 4], [9, 2, 3, 4]])
    b = np.array([[1, 2, 3, 4], [1, 2, 0, 4], [1, 2, 3, 4]])
    assert divergence.count_common(a, b).tolist() == [4, 2, 0]


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_llama, attn_implementation="eager", dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def system(model: Any) -> TorchDecoder:
    config = model.config
    names = ("input_ids", "attention_mask", "position_ids")
    document = {
        "version": 1,
        "task": "text-generation",
        "inputs": [
            {"name": n, "dtype": "int64", "axes": ["batch", "total" if "mask" in n else "sequence"]}
            for n in names
        ],
        "outputs": [
            {"name": "logits", "dtype": "float32", "axes": ["batch", "sequence", config.vocab_size]}
        ],
        "tokenizer": {
            "file": "tokenizer.json", "max_length": 256, "pad_id": 2, "pad_token": "<|im_end|>"
        },
        "generation": {
            "layers": config.num_hidden_layers,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context": 256,
            "eos_ids": [2],
        },
    }  # fmt: skip
    return TorchDecoder(model, Contract.from_json(document))


def test_greedy_tokens_are_those_of_transformers(model: Any, system: TorchDecoder) -> None:
    prompts = np.random.default_rng(0).integers(3, 300, (3, 10))
    theirs = model.generate(
        torch.from_numpy(prompts),
        attention_mask=torch.ones(3, 10, dtype=torch.int64),
        do_sample=False,
        max_new_tokens=12,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert generate_greedily(system, prompts, 12).tolist() == theirs[:, 10:].tolist()


def test_the_common_start_is_that_of_the_greedy_texts_of_both_systems(
    model: Any, system: TorchDecoder
) -> None:
    windows = list(np.random.default_rng(1).integers(3, 300, (16, 64)))
    other, generator = deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in other.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight += 0.01 * weight.std(correction=0) * noise
    changed = TorchDecoder(other, system._contract)
    prompts = np.stack(windows)[:, : divergence.PROMPT]
    texts = [generate_greedily(s, prompts, divergence.NEW) for s in (system, changed)]
    lengths = sorted(divergence.count_common(*texts).tolist())
    assert len(set(lengths)) > 3
    assert divergence.measure(windows, system, changed, 0.95)["lengths"] == lengths


def test_the_baseline_reads_greedy_texts_in_few_passes_no_longer_than_a_window(
    system: TorchDecoder,
) -> None:
    sizes = []

    class Recorded(TorchDecoder):
        def step(self, ids: Any, mask: Any, cache: Any) -> Any:
            sizes.append(ids.size)
            return super().step(ids, mask, cache)

    windows = list(np.random.default_rng(1).integers(3, 300, (16, 200)))
    recorded = Recorded(system._model, system._contract)
    assert divergence.measure(windows, recorded, system, 0.95)["identical"] == 1
    assert max(sizes) <= 200
    assert len(sizes) < divergence.NEW


def test_a_step_leaves_the_cache_it_was_given_as_it_was(system: TorchDecoder) -> None:
    tokens = np.random.default_rng(1).integers(3, 300, (1, 9))
    _, cache = system.step(tokens[:, :8], np.ones((1, 8), np.int64), None)
    before = {n: a.copy() for n, a in cache.items()}
    after = [system.step(tokens[:, 8:], np.ones((1, 9), np.int64), cache)[0] for _ in range(2)]
    assert np.array_equal(*after)
    assert all(np.array_equal(cache[n], before[n]) for n in before)


def test_a_model_never_leaves_its_own_text(system: TorchDecoder) -> None:
    windows = np.random.default_rng(2).integers(3, 300, (5, 24))
    found = divergence.measure(list(windows), system, system, 0.95)
    assert found["mean"] == found["new_tokens"]
    assert found["identical"] == 1
    assert found["prompts"] == 5


def test_logits_of_a_window_do_not_depend_on_padding_before_it(system: TorchDecoder) -> None:
    rows = [np.arange(5, 25), np.arange(30, 37)]
    made = text_generation.arrays(system._contract, rows)
    logits, _ = system.step(made["input_ids"], made["attention_mask"], None)
    assert np.allclose(logits[1, -7:], compute_logits(system, rows[1]), atol=1e-4)
