"""What distillation won back of models that were made smaller: of the output's loss on held-out
text, as benchmarks/encoders/recover.py measured it."""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.harness.tasks import Task


@dataclass(frozen=True)
class Regained:
    """share: of the loss before the first step."""

    model: str
    steps: int
    share: float


ENCODER = Regained("MiniLM with 60 % of the weights in its blocks", 1169, 0.68)
DECODER = Regained("SmolLM2 without 8 of its 30 blocks", 82, 0.50)


def advice(task: Task) -> str:
    """To whom a smaller model that learned nothing misses its margin."""
    similar = DECODER if task.generates else ENCODER
    return (
        f"add reduce.recover, which in {similar.steps:,} steps regained {similar.share:.0%} of "
        f"what {similar.model} had lost"
    )
