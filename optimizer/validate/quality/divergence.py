"""Measure the number of tokens that greedy generation has in common with the float baseline.

Once one token differs the two texts diverge, so only the length of the common start is counted, of
NEW tokens at most. No gate uses it: near ties end it early in a perfect candidate too.

Only the candidate generates. The baseline reads each prompt with the candidate's tokens behind it:
up to the first token that it would not have drawn, both systems have read the same tokens, so the
common start ends there. It takes a few passes, each of one text or of at most the tokens of a
window, whose logits fit in memory already. Generating by the baseline too would read all its
weights NEW times, and those of a large model lie on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimizer.validate.decoder import CachedDecoder, generate_greedily
from optimizer.validate.ledger.distance import Array
from optimizer.validate.quality import significance

PROMPTS, PROMPT, NEW = 16, 32, 32


def measure(
    windows: Sequence[Array], baseline: CachedDecoder, candidate: CachedDecoder, confidence: float
) -> dict[str, Any]:
    """Measure the report's quality.divergence: the length of the start that greedy generation by
    both systems has in common. Prompts are the starts of PROMPTS windows, evenly spaced. Returns

    prompts, prompt_tokens, new_tokens: numbers of prompts, of tokens in each, and of generated
        tokens
    mean, interval: of the length of the common start, in tokens
    identical: share of prompts with equal texts to the end
    lengths: length of each common start, sorted

    windows: token ids of held-out text, one array per window
    """
    at = np.unique(np.linspace(0, len(windows) - 1, PROMPTS).round().astype(int))
    length = max(1, min(PROMPT, min(len(windows[i]) for i in at) // 2))
    prompts = np.stack([windows[i][:length] for i in at])
    tokens = generate_greedily(candidate, prompts, NEW)
    texts = np.concatenate([prompts, tokens[:, :-1]], 1)
    at_once = max(1, max(map(len, windows)) // texts.shape[1])  # texts per pass
    likeliest = [
        baseline.step(part, np.ones_like(part), None)[0][:, length - 1 :].argmax(-1)
        for part in np.split(texts, range(at_once, len(texts), at_once))
    ]
    lengths = count_common(np.concatenate(likeliest), tokens)
    values = lengths.astype(np.float64)
    low, high = significance.bound_mean(values, (1 - confidence) / 2)
    return {
        "prompts": len(prompts),
        "prompt_tokens": length,
        "new_tokens": NEW,
        "mean": float(values.mean()),
        "interval": [max(low, 0.0), min(high, float(NEW))],
        "identical": float((lengths == NEW).mean()),
        "lengths": sorted(int(v) for v in lengths),
    }


def count_common(a: Array, b: Array) -> Array:
    """Count the equal tokens of two models' generated texts before the first difference: (texts,).

    a, b: token ids (texts, tokens)
    """
    lengths: Array = np.cumprod(np.asarray(a == b, np.int64), axis=1).sum(1)
    return lengths
