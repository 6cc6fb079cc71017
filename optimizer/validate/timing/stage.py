"""Stage `latencies`: time models of several sizes, to find those that reach goal.latency_gain.

Speed does not depend on the values of weights. So the checkpoint is cut to each size by keeping its
first units, made into the target's model as the recipe quantizes it, and timed in the
first cell of validate.latency, in turns with the unreduced model quantized alike or in float.
reduce/structure/latency_table.py predicts other sizes from these times and lists what the folder
holds.

While it runs, out/progress/ has a file for every timed size, so a killed run times no size twice.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.stage import files as compress_files
from optimizer.data.datasets import digest_rows, read_samples
from optimizer.export.stage import STAGE as EXPORT
from optimizer.foundation.atomic import finish
from optimizer.foundation.progress import bar, say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import NEUTRAL
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import cores
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.build import files as build_files
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import Latencies
from optimizer.reduce.structure import latency_table
from optimizer.reduce.structure.latency_table import (
    ATTEMPTS,
    TABLE,
    UNREDUCED,
    LatencyTable,
    TimedSize,
)
from optimizer.reduce.structure.layout import ReducedCheckpoint, open_layout
from optimizer.reduce.structure.sizes import SizeChoices, Sizes
from optimizer.reduce.structure.write import write_document
from optimizer.store import Estimate, Shapes, Stage
from optimizer.timing.stopping_rules import PrecisionRule, StoppingRule
from optimizer.validate.timing.latency_gain import GainCell, ModelFolders
from optimizer.validate.timing.sized_models import list_model_folders, make_model

PROGRESS = "progress"
SIZES = 9  # sizes in the table, at most (latency_table.list_grid)
Compare = Callable[[ModelFolders, ModelFolders, StoppingRule], Mapping[str, Any]]
"""Signature of GainCell.compare."""


def run(section: Latencies, reference: Path, out: Path) -> None:
    """Time models of several sizes and write the table of sizes into `out`.

    reference: folder of load

    Raises RecipeError where the methods cannot make the model smaller, or not fast enough, and
    MachineError where the target is not built here.
    """
    measure(section, reference, out, choose_cell(section).compare)


def measure(section: Latencies, reference: Path, out: Path, compare: Compare) -> None:
    """Do the work of `run`.

    compare: function that times two models in turns
    """
    progress = out / PROGRESS
    if (out / TABLE).exists():  # a run was killed after it had written everything
        shutil.rmtree(progress, ignore_errors=True)
        return
    layout = open_layout(section.reduction, reference)
    model = _quantizable(layout.model, section)
    progress.mkdir(exist_ok=True)
    unreduced = progress / UNREDUCED
    if not unreduced.exists():
        say("latencies: quantizing the unreduced model for the target")
        make_model(section, layout, model.full, unreduced)
    beside = _compared_with(section, list_model_folders(unreduced), progress)
    timer = SizeTimer(section, layout, list_model_folders(unreduced), beside, progress, compare)
    full = timer.time_for_table(model.full) if section.reduce.gain_over == "float" else None
    if full:
        latency_table.refuse_reached(full, section.reduce)
    sizes = latency_table.list_grid(model)
    entries = tuple(timer.time_for_table(s) for s in bar(sizes, "latencies"))
    table = LatencyTable(model.full, entries, whole=full.ratio if full else 1.0)
    for entry in ((full,) if full else ()) + entries:
        say(f"latencies: {entry.sizes}: {1 / entry.ratio:.2f} times as fast")
    candidates, confirmed = latency_table.choose(table, model, section.reduce, timer.confirm)
    for predicted, timed in confirmed:
        say(
            f"latencies: {timed.sizes}: {1 / timed.ratio:.2f} times as fast, "
            f"{1 / predicted:.2f} predicted"
        )
    least = section.reduce.least_gain
    if least is not None and not any(
        latency_table.is_surely_reached(t, least) for _, t in confirmed
    ):
        say("latencies: no size is surely fast enough; validate judges the best of them")
    document = {
        "version": latency_table.VERSION,
        "machine": describe_machine().to_json(),
        "threads": section.target.intra_op_threads or cores(),
        "target": section.target.name,
        "cell": describe_cell(section, reference),
        "goal": section.reduce.latency_gain,
        "least": least,
        "over": section.reduce.gain_over,
        "whole": full.as_dict() if full else None,
        "unreduced": asdict(model.full),
        "entries": [entry.as_dict() for entry in entries],
        "outside": table.outside,
        "confirmed": [{"predicted": p, **timed.as_dict()} for p, timed in confirmed],
        "candidates": [asdict(sizes) for sizes in candidates],
    }
    shutil.rmtree(out / UNREDUCED, ignore_errors=True)
    shutil.copytree(beside.model, out / UNREDUCED)
    write_document(out / TABLE, document)
    shutil.rmtree(progress)


def choose_cell(section: Latencies) -> GainCell:
    """Make the cell in which all sizes are timed, with texts of latency.data or neutral ones."""
    data = section.latency.data
    texts = [row.text for row in read_samples(data)] if data else list(NEUTRAL)
    return GainCell(section.target, section.latency, texts, section.reduce.gain_over)


def describe_cell(section: Latencies, source: Path) -> dict[str, int]:
    """Return the sizes of the timed cell: {"batch", and "sequence" or "prompt"}."""
    contract = contracts.read(source / "contract.json")
    second = "prompt" if tasks.look_up(contract).generates else "sequence"
    return dict(zip(("batch", second), choose_cell(section).sizes(contract), strict=True))


def _compared_with(section: Latencies, unreduced: ModelFolders, progress: Path) -> ModelFolders:
    """Return the model with which all sizes are compared: `unreduced`, or its float graph."""
    if section.reduce.gain_over == "same_form":
        return unreduced
    assert section.target.export is not None
    folder = progress / "float"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        EXPORT.run(section.target.export, unreduced.source, out=partial)
        finish(partial, folder)
    return ModelFolders(unreduced.source, folder)


def _quantizable(model: SizeChoices, section: Latencies) -> SizeChoices:
    """Copy of `model` with only the numbers of neurons that the weights' group sizes divide."""
    quantize = section.compression.quantize
    weights = [quantize.weights, *(rule.weights for rule in quantize.layers)]
    groups = math.lcm(*(w.group_size or 1 for w in weights))
    return replace(model, ffn=[n for n in model.ffn if n % groups == 0 or n == model.full.ffn])


@dataclass(frozen=True)
class SizeTimer:
    """Time models of given sizes, each once.

    layout: layout of the reference
    unreduced: the unreduced model as the target runs it
    beside: model that every size is compared with: `unreduced`, or the reference in float
    progress: folder with one file per timed size
    compare: function that times two models in turns
    """

    section: Latencies
    layout: ReducedCheckpoint
    unreduced: ModelFolders
    beside: ModelFolders
    progress: Path
    compare: Compare

    def time_for_table(self, sizes: Sizes) -> TimedSize:
        """Time sizes for the table."""
        return self._time(sizes, "table", SIZES)

    def confirm(self, sizes: Sizes) -> TimedSize:
        """Time sizes that were chosen from the table, also where the table timed them."""
        return self._time(sizes, "confirmed", ATTEMPTS)

    def _time(self, sizes: Sizes, purpose: str, shared: int) -> TimedSize:
        """Time sizes until their ratio is known to within reduce.gain_tolerance, or an equal share
        of latency.max_seconds is spent.

        purpose: part of the name of the file that holds the result, by which it is not timed twice
        shared: number of shares
        """
        name = "-".join(map(str, (purpose, *asdict(sizes).values())))
        file, folder = self.progress / f"{name}.json", self.progress / "smaller"
        if file.exists():
            return latency_table.read_timed(json.loads(file.read_text(encoding="utf-8")))
        shutil.rmtree(folder, ignore_errors=True)
        model = self.unreduced
        if sizes != self.layout.model.full:
            model = make_model(self.section, self.layout, sizes, folder)
        share, seconds = self.section.reduce.gain_tolerance, self.section.latency.max_seconds
        measured = self.compare(self.beside, model, PrecisionRule(share, seconds / shared))
        low, high = measured["interval"]
        timed = TimedSize(sizes, measured["ratio"], (low, high), measured["runs"], measured["p50"])
        write_document(file, timed.as_dict())
        shutil.rmtree(folder, ignore_errors=True)
        return timed


def files(section: Latencies) -> Mapping[str, str]:
    """Return digests of the code and texts that this stage uses through other stages, and the
    machine's key. A stored result is valid only where all of them are equal."""
    data = section.latency.data
    return {
        **compress_files(section.compression),
        **targets.look_up(section.target.runtime).code("lower"),
        **build_files(section.target),
        **({"validate.latency.data": digest_rows(data)} if data else {}),
        "machine": describe_machine().key,
    }


def estimate(section: Latencies, shapes: Shapes) -> Estimate:
    """Estimate the time and memory of making and timing models one after the other, each as large
    as the unreduced one.

    shapes: shape of every tensor of the checkpoint
    """
    read = (
        (COMPRESS, section.compression),
        (EXPORT, section.target.export),
        (LOWER, section.target),
        (BUILD, section.target),
    )
    parts = [s.estimate(part, shapes) for s, part in read if s.estimate and part is not None]
    elements = 4 * sum(map(math.prod, shapes.values()))
    each = sum(part.seconds for part in parts)
    timed = 8e-9 * elements * section.latency.iterations
    return Estimate(
        memory=max(part.memory for part in parts),
        disk=(5 if section.reduce.gain_over == "float" else 3) * elements
        + 2 * sum(part.disk for part in parts),
        seconds=(1 + SIZES + ATTEMPTS) * (each + timed),
    )


STAGE = Stage(
    "latencies",
    2,
    run,
    packages=tuple(dict.fromkeys(p for s in (COMPRESS, EXPORT, LOWER, BUILD) for p in s.packages)),
    files=files,
    measured=True,
    estimate=estimate,
    resumable=True,
)
