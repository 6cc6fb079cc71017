"""Of sizes that are fast alike, those whose model is nearest to the reference.

How much is taken away says little of what it costs: of MiniLM three whole blocks lie further from
it than four narrower ones that take as long. So each is made, of three quarters of the texts, and
its answers on the others are compared with the reference's. (What learning will win back of a
distance is not known beforehand. Of three that learned, it told the worst.)

Alike is what no more than the standard error of their difference, text by text, tells apart: of
those the first, the least cut.

While it runs, `progress`/distances.json holds what was measured so far.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.reduce.structure import outputs
from optimizer.reduce.structure.layout import Layout, opened
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.states import opened_stream, passed

FILE = "distances.json"
JUDGING = 4  # one text of so many is what candidates are judged by

Cut = Callable[[Sizes, Sequence[Batch], Path, Path], object]
"""Sizes, the texts they are chosen on, a folder to work in -> their checkpoint in another."""


@dataclass(frozen=True)
class Measured:
    """A candidate. distances: of each text, in nats or as 1 - cosine."""

    sizes: Sizes
    distances: Tensor

    def as_dict(self) -> dict[str, Any]:
        """What reduced.json says of it."""
        return {"sizes": asdict(self.sizes), "distance": float(self.distances.mean())}


def choose(
    layout: Layout,
    candidates: Sequence[Sizes],
    batches: Sequence[Batch],
    cut: Cut,
    progress: Path,
) -> tuple[Sizes, list[Measured]]:
    """The nearest, and how far each is. layout: of the reference. Raises CheckpointError for
    answers that are not finite."""
    learned, judged = apart(batches)
    file = progress / FILE
    known: list[list[float]] = json.loads(file.read_text()) if file.exists() else []
    reference: Buffer | None = None
    for i, sizes in enumerate(candidates[len(known) :], len(known)):
        if reference is None:
            reference, _ = _behind_the_blocks(layout, judged, progress / "reference")
        folder = progress / f"{i:02d}"
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        cut(sizes, learned, folder, model)
        smaller = opened(layout.section, model)
        hidden, real = _behind_the_blocks(smaller, judged, folder / "hidden")
        distances = _distances(layout, judged, real, (reference, hidden))
        mean = sum(distances) / len(distances)
        if not math.isfinite(mean):
            raise CheckpointError(
                f"{sizes}: its answers are {mean} from the reference's",
                where=str(layout.folder),
                fix="Ask for less of reduce.goal, or use another reduce.importance.",
            )
        say(f"reduce: {sizes}: {mean:.4g} from the reference")
        known.append(distances)
        file.with_suffix(".partial").write_text(json.dumps(known))
        file.with_suffix(".partial").rename(file)
        shutil.rmtree(folder)
    measured = [
        Measured(sizes, torch.tensor(distances, dtype=torch.float64))
        for sizes, distances in zip(candidates, known, strict=True)
    ]
    return nearest(measured), measured


def nearest(measured: Sequence[Measured]) -> Sizes:
    """The first that is not further off than the nearest by more than the standard error of that
    difference (the rule of one standard error of Breiman et al. 1984, section 3.4.3)."""
    best = min(measured, key=lambda m: float(m.distances.mean()))
    for candidate in measured:
        further = candidate.distances - best.distances
        error = float(further.std() / len(further) ** 0.5) if len(further) > 1 else 0.0
        if float(further.mean()) <= error:
            return candidate.sizes
    return best.sizes


def apart(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """The texts to choose on, and every fourth one, to judge by."""
    learned: list[Batch] = []
    judged: list[Batch] = []
    before = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        judging = torch.arange(before, before + count) % JUDGING == JUDGING - 1
        before += count
        for some, rows in ((learned, ~judging), (judged, judging)):
            if bool(rows.any()):
                some.append({name: tensor[rows] for name, tensor in batch.items()})
    return (learned, judged) if judged else (learned, learned)


def _behind_the_blocks(
    layout: Layout, batches: Sequence[Batch], folder: Path
) -> tuple[Buffer, Sequence[Tensor]]:
    """What the last block gives, in files; and which tokens of each batch are real."""
    shutil.rmtree(folder, ignore_errors=True)
    stream = opened_stream(layout, layout.blocks, batches, folder)
    assert isinstance(stream.hidden, Buffer)
    kept = Buffer(Budget(0), folder / "kept")
    for hidden in passed(layout, stream, stream.hidden):
        kept.append(hidden)
    stream.hidden.free()
    return kept, stream.real


def _distances(
    layout: Layout,
    batches: Sequence[Batch],
    real: Sequence[Tensor],
    hidden: tuple[Buffer, Buffer],
) -> list[float]:
    """Of each text, the mean over what it answers; text by text, since logits are large. hidden: of
    the reference and of a candidate. layout: the reference's: what lies outside the blocks is the
    same."""
    distances: list[float] = []
    with outputs.opened(layout, batches[0]) as model, torch.no_grad():
        for batch, rows, *states in zip(batches, real, *hidden, strict=True):
            for i in range(len(rows)):
                text, own = {n: t[i : i + 1] for n, t in batch.items()}, rows[i : i + 1]
                theirs, ours = (model.answers(text, own, s[i : i + 1]) for s in states)
                distances.append(float(model.distance(theirs, ours, own).mean()))
    return distances
