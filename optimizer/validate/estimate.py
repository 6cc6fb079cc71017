"""What validate is predicted to need, from the checkpoint's headers alone."""

from __future__ import annotations

import math

from optimizer.recipe import Validation
from optimizer.store import Estimate, Shapes

ROWS, WINDOWS = 1000, 100  # of an evaluation set that does not say how many


def estimate(section: Validation, shapes: Shapes) -> Estimate:
    """Three models in memory at once; time is dominated by evaluation and timing."""
    elements = sum(math.prod(s) for s in shapes.values())
    if section.validate_.metric == "perplexity":
        return _writing(section, shapes, elements)
    sets = [section.validate_.data, *(s.data for s in section.validate_.also.values())]
    rows = sum(data.samples or ROWS for data in sets)
    cells = len(section.validate_.latency.batch) * len(section.validate_.latency.sequence)
    rounds = cells * section.validate_.latency.iterations
    per_text = 2e-9 * elements
    return Estimate(
        memory=(700 << 20) + 20 * elements,
        disk=1 << 20,
        seconds=10 + per_text * (2 * rows + 12 * rounds),
    )


def _writing(section: Validation, shapes: Shapes, elements: int) -> Estimate:
    """Of text-generation: about a hundred windows through both models, with the logits of one in
    memory for each, and then one token after the other."""
    wanted = section.validate_
    latency, vocabulary = wanted.latency, max((max(s) for s in shapes.values()), default=0)
    logits = 2 * 4 * wanted.sequence_length * vocabulary
    rounds = len(latency.batch) * len(latency.sequence) * latency.iterations
    tokens = sum(latency.sequence) / len(latency.sequence) + 10 * latency.new_tokens
    judged = 2 * WINDOWS * (1 + len(wanted.also)) * wanted.sequence_length
    return Estimate(
        memory=(900 << 20) + 12 * elements + logits,
        disk=1 << 20,
        seconds=30 + 7e-11 * elements * (judged + 2 * rounds * tokens),
    )
