"""Choose among candidate sizes of equal latency the one whose answers are nearest to the reference.

The size of the cut predicts little: MiniLM with three full blocks is further from the reference
than with four narrower ones of the same latency. So each candidate is made on three quarters of the
texts, and its answers on the others are compared with the reference's. (Distillation may change the
order.)

Candidates whose distances differ by at most the standard error of the paired difference count as
equal; the first of them, with the least cut, is chosen.

While it runs, `progress`/distances.json holds the distances so far.
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

from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.reduce.structure import outputs
from optimizer.reduce.structure.layout import ReducedCheckpoint, open_layout
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.states import open_stream, pass_through

FILE = "distances.json"
JUDGING = 4  # one text in JUDGING judges the candidates

Cut = Callable[[Sizes, Sequence[Batch], Path, Path], object]
"""Function (sizes, texts to choose on, work folder, out) that writes the checkpoint to out."""


@dataclass(frozen=True)
class MeasuredSizes:
    """Candidate sizes of a smaller model and their distance from the reference on each text, in
    nats or as 1 - cosine."""

    sizes: Sizes
    distances: Tensor

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate's entry of reduced.json."""
        return {"sizes": asdict(self.sizes), "distance": float(self.distances.mean())}


def choose(
    layout: ReducedCheckpoint,
    candidates: Sequence[Sizes],
    batches: Sequence[Batch],
    cut: Cut,
    progress: Path,
) -> tuple[Sizes, list[MeasuredSizes]]:
    """Make each candidate, measure its distance from the reference, and return (nearest candidate,
    distances of all).

    layout: layout of the reference
    batches: calibration texts
    cut: function that writes a candidate's checkpoint
    progress: folder that keeps the distances for a resumed run

    Raises CheckpointError for answers that are not finite.
    """
    learned, judged = split_texts(batches)
    file = progress / FILE
    done: list[list[float]] = json.loads(file.read_text()) if file.exists() else []
    reference: Buffer | None = None
    for i, sizes in enumerate(candidates[len(done) :], len(done)):
        if reference is None:
            reference, _ = _behind_the_blocks(layout, judged, progress / "reference")
        folder = progress / f"{i:02d}"
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        cut(sizes, learned, folder, model)
        smaller = open_layout(layout.section, model)
        hidden, real = _behind_the_blocks(smaller, judged, folder / "hidden")
        distances = _distances(layout, judged, real, (reference, hidden))
        mean = sum(distances) / len(distances)
        if not math.isfinite(mean):
            raise CheckpointError(
                f"{sizes}: the distance of its answers from the reference's is {mean}; its answers "
                "are not finite",
                where=str(layout.folder),
                fix="Ask for less of reduce.goal, or use another reduce.importance.",
            )
        say(f"reduce: {sizes}: {mean:.4g} from the reference")
        done.append(distances)
        file.with_suffix(".partial").write_text(json.dumps(done))
        file.with_suffix(".partial").rename(file)
        shutil.rmtree(folder)
    measured = [
        MeasuredSizes(sizes, torch.tensor(distances, dtype=torch.float64))
        for sizes, distances in zip(candidates, done, strict=True)
    ]
    return choose_nearest(measured), measured


def choose_nearest(measured: Sequence[MeasuredSizes]) -> Sizes:
    """Return the first candidate whose distance exceeds the smallest by at most the standard error
    of the difference (the one-standard-error rule of Breiman et al. 1984, section 3.4.3)."""
    best = min(measured, key=lambda m: float(m.distances.mean()))
    for candidate in measured:
        further = candidate.distances - best.distances
        error = float(further.std() / len(further) ** 0.5) if len(further) > 1 else 0.0
        if float(further.mean()) <= error:
            return candidate.sizes
    return best.sizes


def split_texts(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into (texts to choose units on, texts to judge by), where every JUDGING-th text
    judges. Fewer than JUDGING texts serve for both."""
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
    layout: ReducedCheckpoint, batches: Sequence[Batch], folder: Path
) -> tuple[Buffer, Sequence[Tensor]]:
    """Compute, for each batch, the output of the last block (in files) and the mask of real
    tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    stream = open_stream(layout, layout.blocks, batches, folder)
    assert isinstance(stream.hidden, Buffer)
    kept = Buffer(BufferBudget(0), folder / "kept")
    for hidden in pass_through(layout, stream, stream.hidden):
        kept.append(hidden)
    stream.hidden.free()
    return kept, stream.real


def _distances(
    layout: ReducedCheckpoint,
    batches: Sequence[Batch],
    real: Sequence[Tensor],
    hidden: tuple[Buffer, Buffer],
) -> list[float]:
    """Return the mean distance of each text between the reference's answers and a candidate's.

    Answers are computed from the output of the last block through the reference's weights after the
    blocks, which every candidate keeps, text by text because logits are large.

    layout: layout of the reference
    real: masks of real tokens, one per batch
    hidden: outputs of the last block, of the reference and of a candidate
    """
    distances: list[float] = []
    with outputs.open_outputs(layout, batches[0]) as model, torch.no_grad():
        for batch, rows, *states in zip(batches, real, *hidden, strict=True):
            for i in range(len(rows)):
                text, mask = {n: t[i : i + 1] for n, t in batch.items()}, rows[i : i + 1]
                expected, answers = (model.answers(text, mask, s[i : i + 1]) for s in states)
                distances.append(float(model.distance(expected, answers, mask).mean()))
    return distances
