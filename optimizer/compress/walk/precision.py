"""Decide the precision of a walk's products for `precision: auto`."""

from __future__ import annotations

from pathlib import Path

from optimizer.compress.walk import products
from optimizer.compress.walk.model_source import ModelSource
from optimizer.recipe.schema import Compress


def decide(section: Compress, source: ModelSource, progress: Path, step: str) -> Compress:
    """Decide in which float type the matrix products of the walk run: return the section with
    `precision: auto` replaced by fp32 or bf16, whichever is faster.

    progress: folder that stores the choice for a run that is resumed
    step: name of the step in messages
    """
    if section.precision != "auto":
        return section
    taken = products.choose(section.precision, source.widest, progress, step, source.device)
    return section.model_copy(update={"precision": taken.precision})
