"""A KV cache in int8: the ledger proves the model without it, and its loss has a gate."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from optimizer.recipe.schema import Validate
from optimizer.validate import target_runner
from optimizer.validate.decoder import OnnxDecoder, compute_logits
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws.decoder import cache_laws
from optimizer.validate.materials import Materials
from optimizer.validate.quality import cached, perplexity
from tests.validate.quality.test_perplexity import TOKENS, ids, logits
from tests.validate.runs import Run, for_openvino

WINDOWS = [np.random.default_rng(seed).integers(5, 60, 40) for seed in range(5)]


@pytest.fixture(scope="module")
def rounded(decoder_runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> Materials:
    folder = tmp_path_factory.mktemp("int8_cache")
    return for_openvino(decoder_runs["fused"], folder, kv_cache="int8").materials()


def furthest(m: Materials, *, exact: bool) -> float:
    """Distance of logits token by token from logits in one step."""
    with closing(target_runner.open_engine(m, 1, exact_cache=exact)) as runner:
        read = list(cached.run_cached(runner, m.contract, WINDOWS))
        system = OnnxDecoder(runner, m.contract)
        whole = [compute_logits(system, window) for window in WINDOWS]
    assert len(read) == len(WINDOWS)
    return max(float(np.abs(a - b).max()) for a, b in zip(read, whole, strict=True))


def test_only_the_rounding_moves_what_is_read_through_the_cache(rounded: Materials) -> None:
    assert furthest(rounded, exact=True) < 1e-4 < furthest(rounded, exact=False)


def test_the_ledger_leaves_the_rounding_to_the_gate(rounded: Materials) -> None:
    entry = ledger.run_hop(cache_laws.cache, rounded)
    assert (entry.ok, entry.problems) == (True, ())


@pytest.mark.parametrize(("worse", "verdict"), [(0.0, "pass"), (2.0, "fail")])
def test_the_gate_is_the_recipes_margin(worse: float, verdict: str) -> None:
    windows = [ids(i) for i in range(200)]
    scores = perplexity.score(windows, lambda w: likely(w, 1.0), lambda w: likely(w, 0.9))
    read = [likely(w, 0.9 - worse) for w in windows]
    settings = Validate(data={"source": "text"}, metric="perplexity", max_drop=0.3)
    gate, section = perplexity.judge_cache(scores, windows, read, settings)
    assert (gate.name, gate.verdict) == ("quality.kv_cache", verdict)
    assert (section["rounding"]["value"] > 0.5) == (verdict == "fail")
    assert section["difference"]["value"] == pytest.approx(-gate.measured)


def likely(window: Array, by: float) -> Array:
    """Logits in which the next token exceeds the others by this much."""
    scores = logits(int(window[0]), 0.5)
    scores[np.arange(TOKENS - 1), window[1:]] += by
    return scores
