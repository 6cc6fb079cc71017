"""How well a candidate predicts held-out text, beside its float baseline, window by window.

Per window of L tokens, over the L - 1 tokens that have one before them:

    nll      mean of -log p(token), nats per token, of either system
    kl       mean over positions of KL(baseline || candidate), nats per token
    top1     share of positions where both hold the same token for the likeliest

What is judged is the paired difference of the nll. A perplexity is exp of the mean nll. Windows
are the examples: tokens of one text depend on each other, so they are averaged first. Logits are
kept for one window at a time, and compared in float64 a few positions at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.recipe.schema import Validate
from optimizer.validate.gates import Gate, lost, reached
from optimizer.validate.ledger.distance import Array
from optimizer.validate.quality import per_example, significance
from optimizer.validate.quality.significance import Decision, Floats

Ids = npt.NDArray[np.int64]
Predict = Callable[[Ids], Array]
"""Token ids (tokens,) -> logits (tokens, vocabulary) of what follows each."""

POSITIONS = 64  # compared at a time: 64 x 150,000 float64 logits are 77 MB


@dataclass(frozen=True)
class Scores:
    """One value per window (windows,) of each measure in the module's docstring."""

    baseline: Floats
    candidate: Floats
    kl: Floats
    top1: Floats
    tokens: int  # whose probability was taken, in all windows together
    digest: str = ""  # of those tokens, as optimizer/validate/token_counts.py defines it

    @property
    def added(self) -> Floats:
        """Nats per token that the candidate loses, by window."""
        return self.candidate - self.baseline


def score(windows: Iterable[Ids], baseline: Predict, candidate: Predict) -> Scores:
    """Both systems on every window (tokens,), two tokens or more."""
    rows, predicted = [], list[Ids]()
    for ids in windows:
        values, tokens = _window(baseline(ids), candidate(ids), ids)
        rows.append(values)
        predicted.append(tokens)
    table = np.array(rows, np.float64).reshape(-1, 4)
    digests = sorted(hashlib.sha256(tokens.tobytes()).digest() for tokens in predicted)
    return Scores(
        table[:, 0],
        table[:, 1],
        table[:, 2],
        table[:, 3],
        sum(map(len, predicted)),
        hashlib.sha256(b"".join(digests)).hexdigest(),
    )


def nll(logits: Array, ids: Ids) -> float:
    """Of one window; logits (tokens, vocabulary)."""
    return _window(logits, logits, ids)[0][0]


def _window(a: Array, b: Array, ids: Ids) -> tuple[tuple[float, float, float, float], Ids]:
    """(baseline nll, candidate nll, kl, top1) of one window, and the tokens whose probability was
    taken; a, b (tokens, vocabulary)."""
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


def through_cache(
    scores: Scores, windows: Sequence[Ids], logits: Iterable[Array], settings: Validate
) -> tuple[Gate, dict[str, Any]]:
    """The gate of a cache that is rounded, and its part of the report: {difference: as of the
    section, rounding: {value, interval} of what it loses to the candidate's own scores, in nats
    per token}. scores: of these windows in one piece; logits: the candidate's, read through it."""
    read = np.array([nll(a, ids) for ids, a in zip(windows, logits, strict=True)])
    decision = significance.paired_mean(
        read - scores.baseline, settings.max_drop, settings.confidence
    )
    low, high = decision.interval
    rounding = _mean(read - scores.candidate, settings.confidence)
    message = (
        f"read token by token through the rounded cache, held-out text costs {decision.drop:+.4f} "
        f"nats per token more than float, {rounding['value']:+.4f} of them by the cache"
    )
    difference = {"value": -decision.drop, "interval": [-high, -low]}
    gate = _bounded("quality.kv_cache", decision, message)
    return gate, {"difference": difference, "rounding": rounding}


def judge(scores: Scores, settings: Validate) -> tuple[list[Gate], dict[str, Any]]:
    """The quality gates of a recipe, and the report's `quality` section:

    metric      "perplexity"; examples: windows; tokens: whose probability was taken; digest: of
                those tokens
    baseline, candidate         {value: perplexity, interval}
    difference  {value, interval}: of the mean log-likelihood, candidate - baseline, nats per token
    margin, confidence, needed  as for every metric
    kl, top1    {value, interval}; added: the candidate's extra nats by window, sorted
    each        {kind: "nats", candidate: [its nats per token, window by window]}
    """
    confidence = settings.confidence
    decision = significance.paired_mean(scores.added, settings.max_drop, confidence)
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
        decided = significance.paired_mean(scores.kl, settings.max_kl, confidence)
        text = f"KL from float is {decided.drop:.4f} nats per token"
        gates.append(_bounded("quality.max_kl", decided, text))
    if settings.min_top1 is not None:
        decided = significance.paired_mean(1 - scores.top1, 1 - settings.min_top1, confidence)
        gates.append(_agreement(decided))
    return gates, section


def _perplexity(nll: Floats, confidence: float) -> dict[str, Any]:
    value = _mean(nll, confidence)
    return {
        "value": math.exp(value["value"]),
        "interval": [math.exp(v) for v in value["interval"]],
    }


def _mean(values: Floats, confidence: float) -> dict[str, Any]:
    """A mean over windows with its two-sided interval."""
    bounds = significance.mean_bounds(values, (1 - confidence) / 2)
    return {"value": float(values.mean()), "interval": list(bounds)}


def _gate(decision: Decision) -> Gate:
    low, high = decision.interval
    message = (
        f"held-out text costs {decision.drop:+.4f} nats per token more than float, between "
        f"{low:.4f} and {high:.4f} at {decision.confidence:.0%} on each side, on "
        f"{decision.examples} windows"
    )
    return Gate(
        "quality.perplexity",
        decision.verdict,
        decision.drop,
        decision.margin,
        decision.interval,
        message + lost(decision) + _more(decision),
    )


def _bounded(name: str, decision: Decision, message: str) -> Gate:
    message += f", on {decision.examples} windows{lost(decision)}{_more(decision)}"
    return Gate(name, decision.verdict, decision.drop, decision.margin, decision.interval, message)


def _agreement(decision: Decision) -> Gate:
    """A share of disagreements as the share of agreements that the recipe speaks of."""
    low, high = decision.interval
    share = 1 - decision.drop
    message = (
        f"{share:.1%} of the likeliest next tokens are float's, on {decision.examples} windows"
    )
    return Gate(
        "quality.min_top1",
        decision.verdict,
        share,
        1 - decision.margin,
        (1 - high, 1 - low),
        message + reached(decision) + _more(decision),
    )


def _more(decision: Decision) -> str:
    if decision.verdict != "inconclusive":
        return ""
    if decision.needed is None:
        return "; it is so near its limit that no number of windows would decide"
    return f"; about {decision.needed} windows would decide"
