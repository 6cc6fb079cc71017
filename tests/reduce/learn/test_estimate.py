"""The estimate of training counts each cost."""

from __future__ import annotations

from typing import Any

from optimizer.recipe.recover import LossWeights, Recover
from optimizer.recipe.schema import DataSpec, Recovery
from optimizer.reduce.learn.estimate import estimate_recovery
from optimizer.store import Estimate

SHAPES = {
    "embeddings.weight": (1000, 64),
    **{f"layer.{i}.up.weight": (128, 64) for i in range(3)},
    **{f"layer.{i}.down.weight": (64, 128) for i in range(3)},
}
DATA = DataSpec(source="json", files=("a.jsonl",))


def predicted(task: str, **options: Any) -> Estimate:
    section = Recover(**{"sequence_length": 64, **options})
    return estimate_recovery(Recovery(recover=section, data=DATA, task=task), SHAPES)


def test_attention_is_counted_for_every_pair_of_tokens() -> None:
    weights = LossWeights(attention=1)
    short, long = (
        predicted("sentence-embedding", sequence_length=n, losses=weights).memory
        - predicted("sentence-embedding", sequence_length=n).memory
        for n in (64, 128)
    )
    assert long == 4 * short > 0


def test_text_of_the_reference_s_own_takes_time() -> None:
    written = predicted("text-generation", generated=500)
    assert written.seconds > predicted("text-generation").seconds
    assert written.memory == predicted("text-generation").memory
