"""Generate windows of text with the teacher, to learn from in addition to the recipe's data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optimizer.compress.data import calibration
from optimizer.compress.walk.model_source import open_source
from optimizer.recipe.recover import Learning
from optimizer.reduce.learn.distill import Split


def add_teacher_text(section: Learning, split: Split, reference: Path, folder: Path) -> Split:
    """Return the split with section.generated more windows to train on. The teacher generates them
    with section.seed from prompts of the training texts; the full model is in memory meanwhile.

    reference: folder of load with the teacher
    folder: folder that keeps the windows for a resumed run
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
