"""Choose the blocks that are removed.

measured   greedy: remove the block whose removal changes the answers least, then the next one with
           that block gone, and so on. Each round measures blocks in the order of their last added
           divergence and stops when the smallest of this round is at most the next block's last
           one. That is the greedy choice as long as a removal makes others only more costly; a
           block of SmolLM2 became cheaper, so a better choice may be missed.
influence  remove the blocks that change their hidden states least, all at once (ShortGPT).

While it runs, `progress`/blocks.json holds the removed blocks, so a killed run resumes there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.compress.walk.activation_buffer import Buffer, BufferBudget
from optimizer.compress.walk.blocks import CalibrationStream
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.progress import bar, say
from optimizer.reduce.methods.block_influence import measure_influence
from optimizer.reduce.structure import outputs
from optimizer.reduce.structure.layout import ReducedCheckpoint
from optimizer.reduce.structure.outputs import LayersOutsideBlocks
from optimizer.reduce.structure.states import open_stream, pass_through, record_entering

FILE = "blocks.json"


@dataclass(frozen=True)
class RemovedBlock:
    """A block that depth reduction removed.

    value: its influence or, with `measured`, the divergence of the answers without it and the
        blocks removed before it, in nats or as 1 - cosine
    """

    block: str
    value: float


def choose(
    layout: ReducedCheckpoint, batches: Sequence[Batch], progress: Path
) -> list[RemovedBlock]:
    """Choose the blocks to remove; return them in the order of choice, [] where the goal keeps
    all."""
    count = len(layout.blocks) - layout.goal.blocks
    if not count:
        return []
    some = sample_texts(batches, layout.section.reduce.depth_samples)
    stream = open_stream(layout, layout.blocks, some, progress / "states")
    search = _DepthSearch(layout, some, stream, progress)
    if layout.section.reduce.depth_importance == "influence":
        return search.by_influence(count)
    return search.measured(count)


def sample_texts(batches: Sequence[Batch], count: int) -> list[Batch]:
    """Choose calibration texts for removing blocks: at most `count`, each as a batch of its own,
    spread evenly over `batches`, which may be ordered by length."""
    texts: list[Batch] = [
        {name: t[i : i + 1] for name, t in batch.items()}
        for batch in batches
        for i in range(len(next(iter(batch.values()))))
    ]
    each = max(1, len(texts) // count)
    return texts[each // 2 :: each][:count]


@dataclass
class _DepthSearch:
    """Search for the blocks of a model whose removal changes its outputs least."""

    layout: ReducedCheckpoint
    batches: Sequence[Batch]
    stream: CalibrationStream  # before the first block, with the uses of all blocks
    progress: Path

    def by_influence(self, count: int) -> list[RemovedBlock]:
        """Return the `count` blocks that change their hidden states least, the least influential
        first."""
        stream = self.stream
        states = record_entering(self.layout, stream, self.progress / "states")
        scores = {}
        for use, (before, after) in enumerate(itertools.pairwise(states)):
            pairs = zip(before, after, stream.real, strict=True)
            rows = [(b[real], a[real]) for b, a, real in pairs]
            befores, afters = (torch.cat(r) for r in zip(*rows, strict=True))
            scores[stream.uses[0][use].block] = measure_influence(befores, afters)
        order = sorted(scores, key=lambda block: scores[block])[:count]
        return [RemovedBlock(block, scores[block]) for block in order]

    def measured(self, count: int) -> list[RemovedBlock]:
        """Remove `count` blocks one after another, each time the one whose removal changes the
        answers least."""
        file = self.progress / FILE
        done: dict[str, Any] = {"gone": [], "added": dict.fromkeys(self.layout.blocks, 0.0)}
        if file.exists():
            done = json.loads(file.read_text())
            say(f"reduce: resuming after {len(done['gone'])} removed blocks")
        with ExitStack() as opened:
            model = opened.enter_context(outputs.open_outputs(self.layout, self.batches[0]))
            reference = self._answers(model)
            while len(done["gone"]) < count:
                self._round(model, reference, done, f"{len(done['gone']) + 1} of {count}")
                file.with_suffix(".partial").write_text(json.dumps(done))
                file.with_suffix(".partial").rename(file)
        return [RemovedBlock(block, value) for block, value in done["gone"]]

    def _round(
        self, model: LayersOutsideBlocks, reference: Buffer, done: dict[str, Any], which: str
    ) -> None:
        gone, added = [block for block, _ in done["gone"]], done["added"]
        total = done["gone"][-1][1] if gone else 0.0
        kept = [[use for use in uses if use.block not in gone] for uses in self.stream.uses]
        stream = replace(self.stream, uses=kept)
        states = record_entering(self.layout, stream, self.progress / "states")
        order = sorted((b for b in added if b not in gone), key=lambda block: added[block])
        fresh: dict[str, float] = {}
        for block in bar(order, f"reduce: block {which}"):
            if gone and fresh and min(fresh.values()) - total <= added[block]:
                continue
            hidden = self._without(stream, states, block)
            fresh[block] = self._divergence(model, reference, hidden)
            hidden.free()
        for after in states[1:]:
            after.free()
        added |= {block: value - total for block, value in fresh.items()}
        block = min(fresh, key=lambda b: fresh[b])
        done["gone"].append((block, fresh[block]))

    def _without(self, stream: CalibrationStream, states: Sequence[Buffer], block: str) -> Buffer:
        """Compute the output of the last block for every batch, without `block` and the blocks
        removed before."""
        names = [use.block for use in stream.uses[0]]
        first = names.index(block)
        assert isinstance(stream.hidden, Buffer)
        hidden = Buffer(stream.hidden.budget, self.progress / "without")
        for before in states[first]:
            hidden.append(before)
        return pass_through(self.layout, stream, hidden, first + 1)

    def _divergence(self, model: LayersOutsideBlocks, reference: Buffer, hidden: Buffer) -> float:
        distances: list[Tensor] = []
        for i, batch in enumerate(self.batches):
            real = self.stream.real[i]
            with torch.no_grad():
                answers = model.answers(batch, real, hidden[i])
            distances.append(model.distance(reference[i], answers, real))
        return float(torch.cat(distances).mean())

    def _answers(self, model: LayersOutsideBlocks) -> Buffer:
        """Compute the outputs of the model before any block is removed, in files because logits are
        large."""
        states = record_entering(self.layout, self.stream, self.progress / "states")
        answers = Buffer(BufferBudget(0), self.progress / "answers")
        with torch.no_grad():
            for i, batch in enumerate(self.batches):
                answers.append(model.answers(batch, self.stream.real[i], states[-1][i]))
        for after in states[1:]:
            after.free()
        return answers
