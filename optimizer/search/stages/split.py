"""Split the rows of an evaluation set into those of the search and those held out.

Rows with the same text (or image, arrays, or query; of questions: the same context) are one group,
also where it differs in case or white space alone, which many tokenizers drop.
Groups are put in the order of the sha256 of that text, and every second group, from the second on,
is held out. So the split depends on the rows alone, not on their order, and no text is on both
sides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

from optimizer.data.sample import Sample
from optimizer.harness.tasks import Task

Part = Literal["search", "held_out"]


def select_rows(part: Part, rows: Sequence[Sample], task: Task) -> list[Sample]:
    """Return the rows of one part of a search, its own or the held-out, in the order of their
    groups, so that the first rows are a random sample of all, also of a file that is sorted by
    label."""
    groups: dict[str, list[Sample]] = {}
    for row in rows:
        groups.setdefault(_key(row, task), []).append(row)
    first = 0 if part == "search" else 1
    return [row for key in sorted(groups)[first::2] for row in groups[key]]


def _key(row: Sample, task: Task) -> str:
    if row.image is not None:
        return row.image.sha256
    if row.arrays is not None:
        return row.arrays.sha256
    text = row.text_pair or "" if task.extracts else row.text
    same = " ".join(text.casefold().split())
    return hashlib.sha256(same.encode()).hexdigest()
