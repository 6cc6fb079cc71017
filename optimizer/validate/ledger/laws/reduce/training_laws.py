"""The hops `recover` and `qat`: check that training changed nothing but the trained values, and
that these have the measured loss.

compared   the checkpoint after training with the one before, and its loss on held-out texts,
           computed here again, with the loss that training recorded
limit      tensors: equal. Loss: its square root moves by at most MOVED distances of correct runs,
           measured in this run, because it is half a squared distance. In a compressed state
           rounding may also flip an integer in few texts, which moves the mean by one text's flips
caught     a norm weight or an embedding moved, a linear as before training, other ranges:
           test_a_planted_fault_is_named_at_the_hop, test_a_planted_fault_is_named,
           test_a_range_as_it_never_was_is_named

 1. names       The checkpoint has the tensors of the one before, by name and shape.
 2. embeddings  Embeddings and tied tensors are unchanged, except of a student without initial
                weights.
 3. finite      No trained value is NaN or infinite.
 4. loss        On held-out texts the model (qat: the compressed state) has the loss that training
                recorded for it, and none above the initial loss.
 5. ranges      (qat) The state's ranges are the trained ones in modules.json.

The remaining loss in accuracy has no limit here: the gates of the task judge it.
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
from optimizer.reduce.learn.distill import (
    TrainingTexts,
    draw_texts,
    is_judged_by_output,
    measure_losses,
)
from optimizer.reduce.learn.pair import Pairing, TeacherAndStudent
from optimizer.reduce.learn.qat import TRAINED
from optimizer.reduce.learn.recover import RECOVERED
from optimizer.reduce.student import is_initialized
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce.structure_laws import open_tensors
from optimizer.validate.materials import Materials

WHY = (
    "only trained values changed, and the loss on held-out texts is the one that training "
    "measured; the task's gates judge the remaining loss in accuracy"
)
MOVED = 8.0
"""Distances of correct runs by which roots of losses may move: the outputs of both models move,
and a vector, its direction and the cosine of two directions by up to twice as much each."""


@dataclass(frozen=True)
class _TrainingRun:
    """One training that the ledger checks: of stage recover or qat. Its models are functions,
    because loading a faulty checkpoint may raise."""

    hop: str
    start: str
    section: Learning
    data: DataSpec
    before: Path  # folder of the checkpoint before training
    after: Path
    report: str  # name of its document in `after`
    model_before: Callable[[], nn.Module]
    model_after: Callable[[], nn.Module]
    judged: Callable[[], nn.Module]  # the model whose loss training recorded
    flips: Callable[[], float] = lambda: 0.0  # median distance of correct runs whose integers flip


def recover(m: Materials) -> LedgerEntry:
    """Hop `recover`: compare the smaller checkpoint after training with the one before."""
    recovery = m.section.recovery
    assert recovery is not None
    assert m.smaller is not None
    assert m.untrained is not None
    learned = _TrainingRun(
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


def qat(m: Materials) -> LedgerEntry:
    """Hop `qat`: compare the trained checkpoint with the one before training."""
    training = m.section.training
    assert training is not None
    assert m.untrained is not None
    learned = _TrainingRun(
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


def collect_figures(m: Materials) -> list[dict[str, Any]]:
    """Collect the report's section `learned`: the record of each training without the names of
    trained tensors."""
    trainings = []
    if m.section.recovery and m.untrained:
        trainings.append({"hop": "recover", **read_json(m.untrained / RECOVERED)})
    if m.section.training:
        trainings.append({"hop": "qat", **read_json(m.source / TRAINED)})
    return [{k: v for k, v in training.items() if k != "trained"} for training in trainings]


def _entry(learned: _TrainingRun, m: Materials) -> LedgerEntry:
    hop, start = learned.hop, learned.start
    document = read_json(learned.after / learned.report)
    problems = [*_tensors(document, learned, m)]
    if problems:
        return LedgerEntry(hop, start, None, None, False, WHY, tuple(problems))
    before = [trace.trace_run(learned.model_before(), b, m.outputs, ()) for b in m.batches]
    after = [trace.run(learned.model_after(), b, m.outputs) for b in m.batches]
    measured = m.output_distance(after, before)
    problems = [*_loss(document, learned, m)]
    return LedgerEntry(hop, start, None, measured, not problems, WHY, tuple(problems))


def _tensors(document: Mapping[str, Any], learned: _TrainingRun, m: Materials) -> Iterator[str]:
    """Check laws 1 to 3: yield a problem for each tensor of the trained checkpoint that is missing,
    is not finite, or changed although it was not trained."""
    embeddings = f"{m.family.prefix(m.task)}{m.family.embeddings}."
    fixed = not is_initialized(learned.before)
    trained = {*document["trained"]}
    with ExitStack() as files:
        old, new = (open_tensors(folder, files) for folder in (learned.before, learned.after))
        for name in sorted(old.keys() ^ new.keys()):
            where = "is not in" if name in old else "is only in"
            yield f"{name}: {where} the trained checkpoint"
        for name in sorted(old.keys() & new.keys()):
            before, after = old[name].get_tensor(name), new[name].get_tensor(name)
            if before.shape != after.shape:
                yield f"{name}: shape {tuple(after.shape)}; {tuple(before.shape)} before training"
            elif (fixed and name.startswith(embeddings)) or name not in trained:
                if not torch.equal(before, after):
                    yield f"{name}: changed, but is not trained"
            elif not bool(torch.isfinite(after).all()):
                yield f"{name}: holds NaN or infinity"


def _loss(document: Mapping[str, Any], learned: _TrainingRun, m: Materials) -> Iterator[str]:
    """Check law 4: yield a problem where the held-out loss rose during training, or is not the loss
    that the training recorded."""
    start, end = document["start"]["output"], document["end"]["output"]
    if is_judged_by_output(learned.section) and end > start:
        yield f"the loss on held-out texts rose from {start:.4g} to {end:.4g}"
    _, held_out = draw_texts(learned.section, learned.data, m.contract, m.reference / "checkpoint")
    prefix, nothing = m.family.prefix(m.task), Pairing((), (), ())
    pair = TeacherAndStudent(
        m.reference_model, learned.judged(), m.family, prefix, m.contract, nothing
    )
    weights = {"output": 1.0, "hidden": 0.0, "attention": 0.0, "labels": 0.0}
    only_output = learned.section.losses.model_copy(update=weights)
    section = learned.section.model_copy(update={"losses": only_output})
    again = measure_losses(pair, section, held_out)["output"]
    # half, because the teacher has no integers that flip
    flips = learned.flips() / len(held_out.rows) / 2
    apart = _furthest(m.correct.source_outputs().limits, m) + flips
    limit = MOVED * apart * _scale(pair, held_out)
    moved = abs(math.sqrt(2 * again) - math.sqrt(2 * end))
    if not moved <= limit:
        far, allowed = write_breach(moved, limit)
        yield (
            f"its loss on held-out texts is {again:.6g}; training measured {end:.6g}: "
            f"{far} apart (root of twice the loss), {allowed} allowed"
        )


def _furthest(distances: Mapping[str, float], m: Materials) -> float:
    """Return the largest distance of an output. A decoder's KV cache is left out, because it does
    not enter the loss."""
    return max(distances[name] for name in m.outputs)


def _ranges(m: Materials) -> Iterator[str]:
    """Check law 5: return a problem for each module whose activation range in the state is not the
    one that training learned."""
    for row in module_rows.read(m.state_folder):
        stored = m.state.range_of(row.module)
        written = None if stored is None else [stored.low, stored.high]
        if written != row.range:
            yield f"{row.module}: its range is {written}; {row.range} was trained"


def _scale(pair: TeacherAndStudent, held_out: TrainingTexts) -> float:
    """Law 4's factor from a relative distance to the loss: the size of logits in a row, over which
    roundoff spreads evenly (twice the divergence is the variance of the error of logits), else
    1."""
    if not (pair.task.classifies or pair.task.generates or pair.task.fills):
        return 1.0
    with torch.no_grad():
        answers: Any = pair.teacher(**held_out.batch(range(min(4, len(held_out.rows)))))
    return float(answers.logits.square().mean(-1).sqrt().max())
