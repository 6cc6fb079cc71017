"""Windows that the teacher itself wrote, learned from beside the given ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optimizer.compress.data import calibration
from optimizer.compress.walk.model_source import open_source
from optimizer.recipe.recover import Learning
from optimizer.reduce.learn.distill import Split


def add_teacher_text(section: Learning, split: Split, reference: Path, folder: Path) -> Split:
    """`split` with section.generated more windows to learn from, drawn with section.seed from the
    model that load wrote to `reference`; none of them judges. They are begun with tokens of the
    windows that are learned from.

    folder: keeps them for a run that is resumed. The whole model is in memory while it writes.
    """
    if not section.generated:
        return split
    learned, task = split.learned, split.learned.contract.task
    prompts = [learned.batch(range(len(learned.rows)))]
    source = open_source(task, reference)
    written = calibration.generate_windows(
        source, prompts, section.generated, section.seed, folder, step=section.step
    )
    return Split(replace(learned, rows=[*learned.rows, *written]), split.held_out)
