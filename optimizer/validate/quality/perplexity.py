"""Compare the perplexities of candidate and float baseline on windows of held-out text.

Per window of L tokens, over the L - 1 predicted tokens:

    nll      mean of -log p(token), nats per token, of either system
    kl       mean over positions of KL(baseline || candidate), nats per token
    top1     share of positions where both systems have the same likeliest token

The gate judges the paired difference of the nll. A perplexity is exp of the mean nll. Windows are
the examples: tokens of one text depend on each other, so they are averaged first. The baseline,
which computes on one thread, is a few windows ahead of the candidate, each in a thread. Logits are
compared in float64 a few positions at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.foundation.process import threads
from optimizer.recipe.schema import Validate
from optimizer.validate.gates import Gate, describe_excess, describe_miss
from optimizer.validate.ledger.distance import Array
from optimizer.validate.quality import per_example, significance
from optimizer.validate.quality.significance import Decision, Floats

Ids = npt.NDArray[np.int64]
Predict = Callable[[Ids], Array]
"""Token ids (tokens,) -> logits (tokens, vocabulary) of the token after each."""

AHEAD = 2  # windows whose baseline is computed at a time; `plan` counts their logits
POSITIONS = 64  # positions compared at a time: 64 x 150,000 float64 logits are 77 MB


@dataclass(frozen=True)
class Scores:
    """Scores of both systems, one value per window (windows,).

    baseline, candidate: nll
    tokens: number of predicted tokens in all windows
    digest: digest of these tokens as in token_counts.py
    """

    baseline: Floats
    candidate: Floats
    kl: Floats
    top1: Floats
    tokens: int
    digest: str = ""

    @property
    def added(self) -> Floats:
        """Nats per token by which the candidate is worse, per window (windows,)."""
        return self.candidate - self.baseline


def score(windows: Iterable[Ids], baseline: Predict, candidate: Predict) -> Scores:
    """Score both systems on every window.

    windows: token ids, two or more in each window
    baseline, candidate: functions window -> logits (tokens, vocabulary)
    """
    rows, predicted = [], list[Ids]()
    for ids, expected in threads.map_in_threads(lambda ids: (ids, baseline(ids)), windows, AHEAD):
        values, tokens = _window(expected, candidate(ids), ids)
        rows.append(values)
        predicted.append(tokens)
    table = np.array(rows, np.float64).reshape(-1, 4)
    digests = sorted(hashlib.sha256(tokens.tobytes()).digest() for tokens in predicted)
    count, digest = sum(map(len, predicted)), hashlib.sha256(b"".join(digests)).hexdigest()
    return Scores(table[:, 0], table[:, 1], table[:, 2], table[:, 3], count, digest)


def measure_nll(logits: Array, ids: Ids) -> float:
    """Compute the nll of one window, in nats per token.

    logits: (tokens, vocabulary)
    ids: token ids (tokens,)
    """
    return _window(logits, logits, ids)[0][0]


def _window(a: Array, b: Array, ids: Ids) -> tuple[tuple[float, float, float, float], Ids]:
    """Score one window: ((baseline nll, candidate nll, kl, top1), predicted tokens).

    a, b: logits (tokens, vocabulary) of baseline and candidate
    """
    totals, predicted, taken = np.zeros(4), len(ids) - 1, list[Ids]()
    for start in range(0, predicted, POSITIONS):
        end = min(start + POSITIONS, predicted)
        p, q = _log_softmax(a[start:end]), _log_softmax(b[start:end])
        at, next_ids = np.arange(end - start), ids[start + 1 : end + 1]
        taken.append(next_ids)
        totals += (
            -p[at, next_ids].sum(),
            -q[at, next_ids].sum(),
            np.where(p > -np.inf, np.exp(p) * (p - q), 0.0).sum(),
            (p.argmax(1) == q.argmax(1)).sum(),
        )
    first, second, kl, top1 = (float(v) for v in totals / predicted)
    return (first, second, max(kl, 0.0), top1), np.concatenate(taken)


def _log_softmax(logits: Array) -> Floats:
    x = logits.astype(np.float64)
    x -= x.max(1, keepdims=True)
    x -= np.log(np.exp(x).sum(1, keepdims=True))
    return x


def judge_cache(
    scores: Scores, windows: Sequence[Ids], logits: Iterable[Array], settings: Validate
) -> tuple[Gate, dict[str, Any]]:
    """Judge a rounded KV cache. Returns its gate and its part of the report: {difference: as in the
    section, rounding: {value, interval} of the loss by the cache alone, in nats per token}.

    scores: scores of these windows, each in one step
    logits: the candidate's logits, token by token through the cache
    """
    read = np.array([measure_nll(a, ids) for ids, a in zip(windows, logits, strict=True)])
    decision = significance.decide_by_mean(
        read - scores.baseline, settings.max_drop, settings.confidence
    )
    low, high = decision.interval
    rounding = _mean(read - scores.candidate, settings.confidence)
    message = (
        f"token by token through the rounded KV cache, held-out text costs {decision.drop:+.4f} "
        f"nats per token more than float, {rounding['value']:+.4f} of them by the cache"
    )
    difference = {"value": -decision.drop, "interval": [-high, -low]}
    gate = _bounded("quality.kv_cache", decision, message)
    return gate, {"difference": difference, "rounding": rounding}


def judge(scores: Scores, settings: Validate) -> tuple[list[Gate], dict[str, Any]]:
    """Judge the quality gates of a recipe, and make the report's `quality` section:

    metric      "perplexity"; examples: number of windows; tokens, digest: of the predicted tokens
    baseline, candidate         {value: perplexity, interval}
    difference  {value, interval} of the mean log-likelihood, candidate - baseline, nats per token
    margin, confidence, needed  as for every metric
    kl, top1    {value, interval}; added: the candidate's extra nats per window, sorted
    each        {kind: "nats", candidate: [nats per token, window by window]}
    """
    confidence = settings.confidence
    decision = significance.decide_by_mean(scores.added, settings.max_drop, confidence)
    low, high = decision.interval
    section: dict[str, Any] = {
        "metric": "perplexity",
        "examples": len(scores.added),
        "tokens": scores.tokens,
        "digest": scores.digest,
        "baseline": _perplexity(scores.baseline, confidence),
        "candidate": _perplexity(scores.candidate, confidence),
        "difference": {"value": -decision.drop, "interval": [-high, -low]},
        "margin": settings.max_drop,
        "confidence": confidence,
        "needed": decision.needed,
        "kl": _mean(scores.kl, confidence),
        "top1": _mean(scores.top1, confidence),
        "added": sorted(round(float(v), 6) for v in scores.added),
        "each": per_example.values("nats", scores.candidate),
    }
    gates = [_gate(decision)]
    if settings.max_kl is not None:
        decided = significance.decide_by_mean(scores.kl, settings.max_kl, confidence)
        text = f"KL from float is {decided.drop:.4f} nats per token"
        gates.append(_bounded("quality.max_kl", decided, text))
    if settings.min_top1 is not None:
        decided = significance.decide_by_mean(1 - scores.top1, 1 - settings.min_top1, confidence)
        gates.append(_agreement(decided))
    return gates, section


def _perplexity(nll: Floats, confidence: float) -> dict[str, Any]:
    value = _mean(nll, confidence)
    return {
        "value": math.exp(value["value"]),
        "interval": [math.exp(v) for v in value["interval"]],
    }


def _mean(values: Floats, confidence: float) -> dict[str, Any]:
    """Return {value, interval} of a mean over windows of text, for the report; the interval is
    two-sided."""
    bounds = significance.bound_mean(values, (1 - confidence) / 2)
    return {"value": float(values.mean()), "interval": list(bounds)}


def _gate(decision: Decision) -> Gate:
    low, high = decision.interval
    message = (
        f"held-out text costs {decision.drop:+.4f} nats per token more than float, between "
        f"{low:.4f} and {high:.4f} at {decision.confidence:.0%} on each side"
    )
    return _bounded("quality.perplexity", decision, message)


def _bounded(name: str, decision: Decision, message: str) -> Gate:
    ending = describe_excess(decision) + _deciding_text(decision)
    message += f", on {decision.examples} windows{ending}"
    return Gate(name, decision.verdict, decision.drop, decision.margin, decision.interval, message)


def _agreement(decision: Decision) -> Gate:
    """Make the gate of min_top1.

    decision: decision on the share of positions at which the likeliest tokens differ
    """
    low, high = decision.interval
    share = 1 - decision.drop
    message = (
        f"{share:.1%} of the likeliest next tokens equal float's, on {decision.examples} windows"
    )
    return Gate(
        "quality.min_top1",
        decision.verdict,
        share,
        1 - decision.margin,
        (1 - high, 1 - low),
        message + describe_miss(decision) + _deciding_text(decision),
    )


def _deciding_text(decision: Decision) -> str:
    if decision.verdict != "inconclusive":
        return ""
    if decision.needed is None:
        return "; it is so near its limit that no number of windows would decide"
    return f"; about {decision.needed} windows would decide"
