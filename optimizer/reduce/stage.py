"""Stage `reduce`: write a smaller checkpoint of the same architecture, or the recipe's student
(student.py). Later stages use it in place of load's, and transformers can load it unchanged.

out/checkpoint/, contract.json, source.json   in the layout of load out/reduced.json
the blocks, units and sizes: see structure/write.py
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from optimizer.compress.data import calibration
from optimizer.compress.walk import precision
from optimizer.compress.walk.capture import Batch
from optimizer.foundation.process import portable_kernels
from optimizer.foundation.progress import say
from optimizer.recipe.schema import Reduction
from optimizer.reduce import predicted, student
from optimizer.reduce.structure import depth, hidden, latency_table, nearest, width
from optimizer.reduce.structure.gradients import measure_gradients
from optimizer.reduce.structure.layout import ReducedCheckpoint, open_layout
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.write import REDUCED, write
from optimizer.store import Estimate, Shapes, Stage

VERSION = 1
PROGRESS = "progress"


def run(section: Reduction, source: Path, latencies: Path | None = None, *, out: Path) -> None:
    """Choose what to remove and write the smaller checkpoint. While it runs, out/progress holds the
    choices so far.

    Raises RecipeError before any computation when the recipe does not fit the model,
    CheckpointError for sums over activations that are not finite, and MachineError where the recipe
    asks for deterministic kernels and others run.

    source: folder of load
    latencies: folder of latencies, for goal.latency_gain
    """
    progress = out / PROGRESS
    if (out / REDUCED).exists():  # a run was killed after it had written everything
        shutil.rmtree(progress, ignore_errors=True)
        return
    if section.compress.deterministic:
        portable_kernels.check()
    if section.reduce.student is not None:
        shutil.rmtree(progress, ignore_errors=True)
        progress.mkdir()
        student.write(section, source, out, progress)
        shutil.rmtree(progress)
        return
    if "hidden" in section.reduce.chosen:
        shutil.rmtree(progress, ignore_errors=True)
        progress.mkdir()
        hidden.run(section, source, progress, out)
        shutil.rmtree(progress)
        return
    layout = open_layout(section, source)
    candidates = latency_table.read_candidates(latencies) if latencies else []
    if not candidates:
        _say(layout)
    progress.mkdir(exist_ok=True)
    walked = precision.decide(section.compress, layout.source, progress, "reduce")
    layout = replace(layout, section=section.model_copy(update={"compress": walked}))
    batches = calibration.make_batches(section, source)
    measured: list[nearest.MeasuredSizes] = []
    if candidates:
        chosen = candidates[0]
        if len(candidates) > 1:
            _say_candidates(candidates, compared=bool(batches))
        if len(candidates) > 1 and batches:
            cut, folder = partial(_cut, layout), progress / "sizes"
            chosen, measured = nearest.choose(layout, candidates, batches, cut, folder)
        layout = replace(layout, chosen=chosen)
        _say(layout)
    _write(layout, batches, progress, out, measured)
    shutil.rmtree(progress)


def _cut(
    layout: ReducedCheckpoint, sizes: Sizes, batches: Sequence[Batch], progress: Path, out: Path
) -> None:
    say(f"reduce: {sizes}")
    _write(replace(layout, chosen=sizes), batches, progress, out)


def _write(
    layout: ReducedCheckpoint,
    batches: Sequence[Batch],
    progress: Path,
    out: Path,
    measured: Sequence[nearest.MeasuredSizes] = (),
) -> None:
    """Choose blocks and units on the batches, and write the smaller model."""
    section = layout.section
    left_out = depth.choose(layout, batches, progress)
    for gone in left_out:
        say(f"reduce: {gone.block} is removed ({section.reduce.depth_importance} {gone.value:.4g})")
    blocks = [b for b in layout.blocks if b not in {gone.block for gone in left_out}]
    gradients: width.Gradients = {}
    if section.reduce.importance == "fisher" and width.list_thinned(layout, blocks[0]):
        gradients = measure_gradients(layout, blocks, batches, progress)
    choices = width.choose(layout, blocks, batches, gradients, progress)
    write(layout, choices, left_out, out, compared=[m.as_dict() for m in measured])


def check(section: Reduction, source: Path) -> None:
    """Raise the errors of `run` for a recipe that does not fit the model's names and shapes."""
    if section.reduce.student is not None:
        student.check(section, source)
        return
    layout = open_layout(section, source)
    if "hidden" in section.reduce.chosen:
        hidden.find_goal(layout)
        return
    _ = layout.model if section.reduce.latency_gain else layout.goal


def _say_candidates(candidates: Sequence[Sizes], *, compared: bool) -> None:
    several = "; ".join(map(str, candidates))
    how = "making the one nearest to the reference"
    if not compared:
        how = "making the first, which removes least: the recipe has no text to compare them on"
    say(f"reduce: these sizes meet the latency goal: {several}; {how}")


def _say(layout: ReducedCheckpoint) -> None:
    model, kept = layout.model, layout.goal
    share = model.in_blocks(kept) / model.in_blocks(model.full)
    parts = [f"{kept.blocks} of {model.full.blocks} blocks"]
    parts += [f"{kept.ffn} of {model.full.ffn} neurons"] if model.full.ffn else []
    parts += [f"{kept.heads} of {model.full.heads} key/value heads"] if model.full.heads else []
    say(
        f"reduce: {', '.join(parts)} per block: {model.parameters(kept):,} of "
        f"{model.parameters(model.full):,} parameters, {share:.3f} of the weights in the blocks"
    )


def files(section: Reduction) -> Mapping[str, str]:
    """Return {name: digest} of the calibration rows, or of the student's files."""
    from optimizer.data.datasets import digest_rows

    if section.reduce.student is not None:
        return student.files(section)
    return {"calibrate": digest_rows(section.calibrate.data)} if section.calibrate else {}


def shapes(section: Reduction, reference: Shapes, *_latencies: Shapes) -> Shapes:
    """Return the shapes of the tensors that the stage will write."""
    if section.reduce.student is not None:
        return student.shapes(section)
    return predicted.predict_shapes(section, reference)


def estimate(section: Reduction, reference: Shapes) -> Estimate:
    """Predict memory, disk and time of stage reduce. reference: shape of every tensor that load
    writes."""
    if section.reduce.student is not None:
        return student.estimate(section)
    return predicted.estimate(section, reference)


STAGE = Stage(
    "reduce",
    VERSION,
    run,
    packages=("torch", "transformers", "tokenizers"),
    files=files,
    estimate=estimate,
    shapes=shapes,
    remark=predicted.write_remark,
    resumable=True,
)
