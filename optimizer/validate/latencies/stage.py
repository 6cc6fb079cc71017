"""latencies: which sizes make the target's model so many times as fast as it is of the whole model.

Speed does not depend on what weights hold. So the checkpoint is cut to some sizes, whatever is
kept, made into what the target runs, in the form that the recipe asks for, and timed on the first
cell of validate.latency beside the whole one, in the same form or in float, in one run;
reduce/structure/latency_table.py says how a size follows from that, and what the folder holds.

While it runs, out/progress/ has a file for every size that was timed, so that a killed run does not
time it again.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from optimizer import targets
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.stage import files as compress_files
from optimizer.data.datasets import digest
from optimizer.export.stage import STAGE as EXPORT
from optimizer.foundation.atomic import finish
from optimizer.foundation.progress import bar, say
from optimizer.harness.runtimes.machine import this_machine
from optimizer.harness.runtimes.ort.run import cores
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.build import files as build_files
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import Latencies
from optimizer.reduce.structure import latency_table
from optimizer.reduce.structure.latency_table import ATTEMPTS, TABLE, UNREDUCED, Table
from optimizer.reduce.structure.layout import opened
from optimizer.reduce.structure.sizes import Model
from optimizer.store import Estimate, Shapes, Stage
from optimizer.validate.latencies.form import built, model_of
from optimizer.validate.latencies.timing import SIZES, Bench, Compared, cell, place, write
from optimizer.validate.speed.gain import Built

PROGRESS = "progress"


def run(section: Latencies, reference: Path, out: Path) -> None:
    """reference: what load wrote. Raises RecipeError when the model cannot be made smaller so, or
    not fast enough; MachineError when the target is not built here."""
    measure(section, reference, out, cell(section).compared)


def measure(section: Latencies, reference: Path, out: Path, compared: Compared) -> None:
    """As `run`, timed by a function of one's own."""
    progress = out / PROGRESS
    if (out / TABLE).exists():  # killed while tidying up after the end
        shutil.rmtree(progress, ignore_errors=True)
        return
    layout = opened(section.reduction, reference)
    model = _quantizable(layout.model, section)
    progress.mkdir(exist_ok=True)
    whole = progress / UNREDUCED
    if not whole.exists():
        say("latencies: making the whole model in the target's form")
        model_of(section, layout, model.full, whole)
    beside = _beside(section, built(whole), progress)
    bench = Bench(section, layout, built(whole), beside, progress, compared)
    own = bench.entry(model.full) if section.reduce.gain_over == "float" else None
    if own:
        latency_table.refuse_reached(own, section.reduce)
    sizes = latency_table.grid(model)
    entries = tuple(bench.entry(s) for s in bar(sizes, "latencies"))
    table = Table(model.full, entries, whole=own.ratio if own else 1.0)
    for entry in ((own,) if own else ()) + entries:
        say(f"latencies: {entry.sizes}: {1 / entry.ratio:.2f} times as fast")
    candidates, confirmed = latency_table.choose(table, model, section.reduce, bench.confirmed)
    for predicted, known in confirmed:
        say(
            f"latencies: {known.sizes}: {1 / known.ratio:.2f} times as fast, "
            f"{1 / predicted:.2f} predicted"
        )
    least = section.reduce.least_gain
    if least is not None and not any(latency_table.surely(k, least) for _, k in confirmed):
        say("latencies: none is surely fast enough; the best goes on, and validate judges it")
    document = {
        "version": latency_table.VERSION,
        "machine": this_machine().to_json(),
        "threads": section.target.intra_op_threads or cores(),
        "target": section.target.name,
        "cell": place(section, reference),
        "goal": section.reduce.latency_gain,
        "least": least,
        "over": section.reduce.gain_over,
        "whole": own.as_dict() if own else None,
        "unreduced": asdict(model.full),
        "entries": [entry.as_dict() for entry in entries],
        "outside": table.outside,
        "confirmed": [{"predicted": p, **known.as_dict()} for p, known in confirmed],
        "candidates": [asdict(sizes) for sizes in candidates],
    }
    shutil.rmtree(out / UNREDUCED, ignore_errors=True)
    shutil.copytree(beside.model, out / UNREDUCED)
    write(out / TABLE, document)
    shutil.rmtree(progress)


def _beside(section: Latencies, whole: Built, progress: Path) -> Built:
    """What all sizes are timed beside."""
    if section.reduce.gain_over == "same_form":
        return whole
    assert section.target.export is not None
    folder = progress / "float"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        EXPORT.run(section.target.export, whole.source, out=partial)
        finish(partial, folder)
    return Built(whole.source, folder)


def _quantizable(model: Model, section: Latencies) -> Model:
    """With the numbers of neurons that groups of weights divide."""
    quantize = section.compression.quantize
    weights = [quantize.weights, *(rule.weights for rule in quantize.layers)]
    groups = math.lcm(*(w.group_size or 1 for w in weights))
    return replace(model, ffn=[n for n in model.ffn if n % groups == 0 or n == model.full.ffn])


def files(section: Latencies) -> Mapping[str, str]:
    """What the steps of other stages read and call, the timed texts, and the machine: its times are
    no other machine's."""
    machine, data = this_machine(), section.latency.data
    return {
        **compress_files(section.compression),
        **targets.of(section.target.runtime).code("lower"),
        **build_files(section.target),
        **({"validate.latency.data": digest(data)} if data else {}),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.gpu}",
    }


def estimate(section: Latencies, shapes: Shapes) -> Estimate:
    """One model after the other is made and timed, each as if it were the whole one."""
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
