"""The hops `recover` and `qat`: is a model what it learned to be, and nothing else?

 1. its checkpoint has the tensors of the one before, by name and shape;
 2. embeddings, and what is tied to them, are bit for bit what they were: nothing trains them, but
    those of a student that began without weights;
 3. no trained value is NaN or infinite;
 4. on the held-out texts the model (of qat: the compressed state) has the loss that training
    measured of the weights it kept, and none above the one it started with. The loss is half a
    squared distance, so its root moves by no more than the outputs of two correct runs, the limit
    of which is measured in this run. Of a compressed state rounding may also flip an integer, in
    few texts: the mean moves by what flips move one of them;
 5. of qat: the ranges of the state are those that modules.json says were trained.

What was not recovered has no limit here: the gates of the task judge it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from optimizer.compress import module_rows
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.recover import Learning
from optimizer.recipe.schema import DataSpec
from optimizer.reduce.learn.distill import Texts, judged_by_output, losses_of, texts
from optimizer.reduce.learn.pair import Pair, Pairing
from optimizer.reduce.learn.qat import TRAINED
from optimizer.reduce.learn.recover import RECOVERED
from optimizer.reduce.student import initialized
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.breach import breach
from optimizer.validate.ledger.entry import Entry
from optimizer.validate.materials import Materials

WHY = (
    "nothing but trained values changed, and the loss on held-out texts is the one that training "
    "measured; the task's gates judge what is still lost"
)
MOVED = 8.0
"""Roots of losses move by at most this many distances of correct runs: both models' outputs move,
and a vector, its direction and the cosine of two directions by up to twice as much each."""


@dataclass(frozen=True)
class _Training:
    """One training. before, after: the folders of its checkpoints, and their models; report: the
    document of it in `after`; judged: the model whose loss training measured; flips: how far an
    output usually lies from that of another correct run where integers flip. These are functions,
    because what the files hold may build no model."""

    hop: str
    start: str
    section: Learning
    data: DataSpec
    before: Path
    after: Path
    report: str
    model_before: Callable[[], nn.Module]
    model_after: Callable[[], nn.Module]
    judged: Callable[[], nn.Module]
    flips: Callable[[], float] = lambda: 0.0


def recover(m: Materials) -> Entry:
    """The checkpoint that learned against the smaller one."""
    recovery = m.section.recovery
    assert recovery is not None
    assert m.smaller is not None
    assert m.untrained is not None
    learned = _Training(
        "recover",
        "smaller torch",
        recovery.recover,
        recovery.data,
        m.smaller,
        m.untrained,
        RECOVERED,
        lambda: m.smaller_model,
        lambda: m.untrained_model,
        lambda: m.untrained_model,
    )
    return _entry(learned, m)


def qat(m: Materials) -> Entry:
    """The trained checkpoint against the one that was compressed."""
    training = m.section.training
    assert training is not None
    assert m.untrained is not None
    learned = _Training(
        "qat",
        "untrained torch",
        training.qat,
        training.data,
        m.untrained,
        m.source,
        TRAINED,
        lambda: m.untrained_model,
        lambda: m.float_model,
        lambda: m.simulated_model,
        lambda: _furthest(m.correct.graph_outputs("state", "fp32").medians, m),
    )
    entry = _entry(learned, m)
    problems = (*entry.problems, *_ranges(m))
    return replace(entry, ok=not problems, problems=problems)


def figures(m: Materials) -> list[dict[str, Any]]:
    """What the report says of each training."""
    trainings = []
    if m.section.recovery and m.untrained:
        trainings.append({"hop": "recover", **read_json(m.untrained / RECOVERED)})
    if m.section.training:
        trainings.append({"hop": "qat", **read_json(m.source / TRAINED)})
    return [{k: v for k, v in training.items() if k != "trained"} for training in trainings]


def _entry(learned: _Training, m: Materials) -> Entry:
    hop, start = learned.hop, learned.start
    document = read_json(learned.after / learned.report)
    problems = [*_tensors(document, learned, m)]
    if problems:
        return Entry(hop, start, None, None, False, WHY, tuple(problems))
    before = [trace.traced(learned.model_before(), b, m.outputs, ()) for b in m.batches]
    after = [trace.run(learned.model_after(), b, m.outputs) for b in m.batches]
    measured = m.output_distance(after, before)
    problems = [*_loss(document, learned, m)]
    return Entry(hop, start, None, measured, not problems, WHY, tuple(problems))


def _tensors(document: Mapping[str, Any], learned: _Training, m: Materials) -> Iterator[str]:
    """Laws 1 to 3."""
    embeddings = f"{m.family.prefix(m.task)}{m.family.embeddings}."
    fixed = not initialized(learned.before)
    trained = {*document["trained"]}
    with ExitStack() as files:
        old, new = (_opened(folder, files) for folder in (learned.before, learned.after))
        for name in sorted(old.keys() ^ new.keys()):
            where = "is not in" if name in old else "is only in"
            yield f"{name}: {where} the checkpoint that learned"
        for name in sorted(old.keys() & new.keys()):
            before, after = old[name].get_tensor(name), new[name].get_tensor(name)
            if before.shape != after.shape:
                yield f"{name}: {tuple(after.shape)}, and {tuple(before.shape)} before it learned"
            elif (fixed and name.startswith(embeddings)) or name not in trained:
                if not torch.equal(before, after):
                    yield f"{name}: changed, and it is not trained"
            elif not bool(torch.isfinite(after).all()):
                yield f"{name}: holds NaN or infinity"


def _opened(folder: Path, files: ExitStack) -> dict[str, Any]:
    """{name: the open file that holds it}, by the safetensors library."""
    from safetensors import safe_open

    opened: dict[str, Any] = {}
    for file in sorted((folder / "checkpoint").glob("*.safetensors")):
        handle = files.enter_context(safe_open(file, "pt"))
        opened |= dict.fromkeys(handle.keys(), handle)
    return opened


def _loss(document: Mapping[str, Any], learned: _Training, m: Materials) -> Iterator[str]:
    """Law 4."""
    start, end = document["start"]["output"], document["end"]["output"]
    if judged_by_output(learned.section) and end > start:
        yield f"the loss on held-out texts rose from {start:.4g} to {end:.4g}"
    _, held_out = texts(learned.section, learned.data, m.contract, m.reference / "checkpoint")
    prefix, nothing = m.family.prefix(m.task), Pairing((), (), ())
    pair = Pair(m.reference_model, learned.judged(), m.family, prefix, m.contract, nothing)
    weights = {"output": 1.0, "hidden": 0.0, "attention": 0.0, "labels": 0.0}
    only_output = learned.section.losses.model_copy(update=weights)
    section = learned.section.model_copy(update={"losses": only_output})
    again = losses_of(pair, section, held_out)["output"]
    # The teacher has no integers, so that half of what moves is left.
    flips = learned.flips() / len(held_out.rows) / 2
    apart = _furthest(m.correct.source_outputs().limits, m) + flips
    limit = MOVED * apart * _scale(pair, held_out)
    moved = abs(math.sqrt(2 * again) - math.sqrt(2 * end))
    if not moved <= limit:
        far, allowed = breach(moved, limit)
        yield (
            f"its loss on held-out texts is {again:.6g}, and training measured {end:.6g}: "
            f"{far} apart (root of twice the loss), {allowed} allowed"
        )


def _furthest(distances: Mapping[str, float], m: Materials) -> float:
    """Of the output that lies furthest apart; a decoder's cache is none that is learned from."""
    return max(distances[name] for name in m.outputs)


def _ranges(m: Materials) -> Iterator[str]:
    """Law 5."""
    for row in module_rows.read(m.state_folder):
        known = m.state.range_of(row.module)
        written = None if known is None else [known.low, known.high]
        if written != row.range:
            yield f"{row.module}: its range is {written}, and {row.range} was trained"


def _scale(pair: Pair, held_out: Texts) -> float:
    """What a relative distance is multiplied by: of logits their size in a row, over which roundoff
    spreads evenly (twice the divergence is the variance of the error of logits), else 1."""
    if not (pair.task.classifies or pair.task.generates):
        return 1.0
    with torch.no_grad():
        answers: Any = pair.teacher(**held_out.batch(range(min(4, len(held_out.rows)))))
    return float(answers.logits.square().mean(-1).sqrt().max())
