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
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Budget, Buffer
from optimizer.compress.walk.capture import Batch
from optimizer.progress import say
from optimizer.reduce import outputs
from optimizer.reduce.layout import Layout, opened
from optimizer.reduce.sizes import Sizes
from optimizer.reduce.states import opened_stream, passed

FILE = "distances.json"
JUDGING = 4  # one text of so many is what candidates are judged by

Cut = Callable[[Sizes, Sequence[Batch], Path, Path], object]
"""Sizes, the texts they are chosen on, a folder to work in -> their checkpoint in another."""


@dataclass(frozen=True)
class Measured:
    """A candidate. distances: of each text or token, in nats or as 1 - cosine."""

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
    """The nearest, and how far each is. layout: of the reference."""
    learned, judged = apart(batches)
    file = progress / FILE
    known: list[list[float]] = json.loads(file.read_text()) if file.exists() else []
    reference: Buffer | None = None
    for i, sizes in enumerate(candidates[len(known) :], len(known)):
        if reference is None:
            reference, _ = _answers(layout, judged, progress / "reference")
        folder = progress / f"{i:02d}"
        made = folder / "model"
        made.mkdir(parents=True, exist_ok=True)
        cut(sizes, learned, folder, made)
        smaller = opened(layout.section, made)
        known.append(_distances(smaller, judged, reference, folder / "answers"))
        say(f"reduce: {words(sizes)}: {sum(known[-1]) / len(known[-1]):.4g} from the reference")
        file.with_suffix(".partial").write_text(json.dumps(known))
        file.with_suffix(".partial").rename(file)
        shutil.rmtree(folder)
    measured = [
        Measured(sizes, torch.tensor(distances, dtype=torch.float64))
        for sizes, distances in zip(candidates, known, strict=True)
    ]
    return nearest(measured), measured


def nearest(measured: Sequence[Measured]) -> Sizes:
    """The first that is not further off than the nearest by more than the standard error."""
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


def words(sizes: Sizes) -> str:
    """Of a candidate."""
    parts = [f"{sizes.blocks} blocks"]
    parts += [f"{sizes.ffn} neurons"] if sizes.ffn else []
    parts += [f"{sizes.heads} key/value heads"] if sizes.heads else []
    return ", ".join(parts)


def _answers(
    layout: Layout, batches: Sequence[Batch], folder: Path
) -> tuple[Buffer, Sequence[Tensor]]:
    """The model's, in files, since logits are large; and which tokens of each batch are real."""
    shutil.rmtree(folder, ignore_errors=True)
    stream = opened_stream(layout, layout.blocks, batches, folder)
    assert isinstance(stream.hidden, Buffer)
    hidden = passed(layout, stream, stream.hidden)
    answers = Buffer(Budget(0), folder / "answers")
    with outputs.opened(layout, batches[0]) as model, torch.no_grad():
        for i, batch in enumerate(batches):
            answers.append(model.answers(batch, stream.real[i], hidden[i]))
    return answers, stream.real


def _distances(
    layout: Layout, batches: Sequence[Batch], reference: Buffer, folder: Path
) -> list[float]:
    """Of each text, the mean over what it answers."""
    answers, real = _answers(layout, batches, folder)
    distances: list[float] = []
    with outputs.opened(layout, batches[0]) as model:
        for theirs, ours, rows in zip(reference, answers, real, strict=True):
            texts = zip(theirs.split(1), ours.split(1), rows.split(1), strict=True)
            distances += [float(model.distance(*text).mean()) for text in texts]
    return distances
