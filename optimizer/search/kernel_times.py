"""Times of a recipe's model on one machine, module by module, for a search on another.

The recipe's model is built and timed end to end in the first cell of validate.latency. It and the
float graph are profiled by module (measure/module_times.py). For a candidate that keeps the modules
K in float, the time relative to the recipe's own is predicted as

    1 + forward / p50 * (sum over K of float_m - own_m) / (sum over all modules of own_m)

where forward / p50 is the share of the time spent in the model. Kernel times are used only relative
to each other, because other work on the machine lengthens the time end to end, and not the median
of a kernel. Methods change integers and scales, not kernels. Effects between modules are neglected,
such as two modules that share the quantizer of their input.

The table is that of measure/table.py with another `of`, and
    form      {target, quantize, checkpoint: {file: sha256}}: a search refuses a table of another
              model
    float     module_times.py of the float graph; `modules` is that of the recipe's model
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from optimizer.data.datasets import pick_input, read_samples
from optimizer.foundation.errors import DataError, MachineError, RecipeError
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.runtimes.ort.run import OrtRunner, cores
from optimizer.measure import module_times, table
from optimizer.recipe.schema import Recipe
from optimizer.search import candidates
from optimizer.search.workbench import BuiltCandidate, Workbench
from optimizer.shared_store import Root
from optimizer.validate.target_runner import open_onnx
from optimizer.validate.timing.batch_timing import list_cells, make_system

LEAST = 0.02  # ms of a module: a profile counts whole microseconds, 5 % of it; a choice
Json = dict[str, Any]


@dataclass(frozen=True)
class KernelTimes:
    """Times of a recipe's model on another machine, read from a table.

    file: path of the table, for messages
    machine: processor that was measured
    p50: median ms of the recipe's model, end to end
    forward: median ms of the recipe's model, without encoding and decoding
    own: {module: ms} in the recipe's model
    full: {module: ms} in the float model
    """

    file: str
    machine: str
    p50: float
    forward: float
    own: Mapping[str, float]
    full: Mapping[str, float]

    def figures(self, kept: Sequence[str]) -> Json:
        """Predict {"ratio", "ratio_interval", "p50" in ms} of a candidate.

        kept: modules that the candidate keeps in float

        Raises DataError for a module without a time.
        """
        if unknown := [name for name in kept if name not in self.own or name not in self.full]:
            raise DataError(f"it has no time of module {unknown[0]}", where=self.file)
        added = sum(self.full[name] - self.own[name] for name in kept) / sum(self.own.values())
        ratio = 1 + self.forward / self.p50 * added
        if ratio <= 0:
            raise DataError("its modules take longer than the whole model", where=self.file)
        return {"ratio": ratio, "ratio_interval": (ratio, ratio), "p50": ratio * self.p50}


def measure(recipe: Recipe, root: Root, seconds: float, price: float | None) -> Json:
    """Build for a search the recipe's model, and measure its table on this machine. Raises
    MachineError where ONNX Runtime does not run it, RecipeError for text generation."""
    first = candidates.list_candidates(recipe)[0]
    _check_task(recipe)
    built = Workbench(recipe, root, first).build(first)
    base, target = built.artifacts.base.path, built.recipe.targets[0]
    contract = contracts.read(base / "contract.json")
    task = tasks.look_up(contract)
    encoder = task.inputs.open(base / "checkpoint", contract)
    latency = built.recipe.validate_.latency
    cell = list_cells(latency, tasks.longest(contract))[0]
    rows = read_samples(latency.data) if latency.data else ()
    texts = [pick_input(row, task) for row in rows] or task.inputs.neutral(contract)
    threads = target.intra_op_threads or cores()
    profiles, rates = {}, None
    for name, model in (("float", built.artifacts.graph), ("modules", built.artifacts.model)):
        with closing(open_onnx(target, model.path / "model.onnx", contract, threads)) as runner:
            if not isinstance(runner, OrtRunner):
                raise MachineError(
                    "only models of ONNX Runtime are profiled by module",
                    where=f"target {target.name}",
                )
            system = make_system(runner.infer, contract, encoder)
            rates = rates or table.measure_rates(runner)
            arrays = table.build_arrays(system, texts, cell)
            profiles[name] = module_times.measure(runner, arrays, rates)
            if name == "modules":
                document = table.measure_system(system, texts, [cell], threads, seconds, price)
    say(f"measure: {built.recipe.name}: {document['cells'][0]['p50']:.3g} ms")
    document["rates"] = rates and rates.to_json()
    return {**document, **profiles, "form": _describe(built), "engine": target.name}


def _check_task(recipe: Recipe) -> None:
    if any(c.size < 1 for c in candidates.list_candidates(recipe)):
        raise RecipeError(
            "times by module are those of the model as it is, and the search has other sizes",
            where="search.over.size",
            fix="Search on the machine that the model is for.",
        )
    if tasks.find_task(recipe.model.task).generates:
        raise RecipeError(
            "times by module are those of one run, and the task generates text",
            where="model.task",
            fix="Search on the machine that the model is for.",
        )


def _describe(built: BuiltCandidate) -> Json:
    """Return the field `form` of a search's table of times: target, formats, checkpoint and timed
    cell."""
    source = json.loads((built.artifacts.base.path / "source.json").read_text("utf-8"))
    recipe = built.recipe
    return {
        "target": recipe.targets[0].model_dump(mode="json"),
        "quantize": recipe.quantize.model_dump(mode="json", by_alias=True),
        "checkpoint": {name: one["sha256"] for name, one in source["files"].items()},
        "cell": [recipe.validate_.latency.batch[0], recipe.validate_.latency.sequence[0]],
    }


def check_recipe(recipe: Recipe) -> None:
    """Raise RecipeError for a search that needs times of this machine.

    With --times a search has only times of another machine, for one target and float modules.
    """
    _check_task(recipe)
    search = candidates.get_section(recipe)
    latency, limits = recipe.validate_.latency, search.constraints
    if not search.timed:
        raise RecipeError(
            f"the search minimises {search.objective}, for which nothing is timed",
            where="--times",
            fix="Omit --times, or set search.objective: latency.",
        )
    if search.choose_batch(latency) != latency.batch[0]:
        raise RecipeError(
            f"the search minimises the time of batch {max(latency.batch)}, and a table has that of "
            f"batch {latency.batch[0]}, the first of validate.latency",
            where="search.objective",
            accepted="latency with --times",
            fix=f"Omit --times, or set validate.latency.batch=[{max(latency.batch)}] for the table "
            "and the search.",
        )
    for where, needed, accepted in (
        ("validate.latency.must_beat_float", latency.must_beat_float, "false"),
        ("validate.latency.p99_ms", latency.p99_ms is not None, "null"),
        ("search.constraints.latency.p99_ms", limits.p99_ms is not None, "null"),
        ("search.over.server", search.over.server, "false"),
    ):
        if needed:
            raise RecipeError(
                "it would be judged by times of this machine, and --times has those of another",
                where=where,
                accepted=accepted,
                fix=f"Set it for this search, e.g. --set {where}={accepted}.",
            )
    space = candidates.list_candidates(recipe)
    if any(c.target != space[0].target or c.attention != space[0].attention for c in space):
        raise RecipeError(
            "--times has the times of one target and one kind of attention, and the search has "
            "several",
            where="search.over",
            fix=f"Set search.over.targets=[{space[0].target}] and "
            f"search.over.attention=[{space[0].attention}].",
        )
    if candidates.name_finer_precision(recipe.quantize) != "float":
        raise RecipeError(
            "--times has the times of modules in float, and this search keeps some in int8",
            where="search.over.precision",
            accepted="recipe",
        )


def read(file: Path, key: Path | None, built: BuiltCandidate) -> KernelTimes:
    """Read for a search the table of times of a recipe's model.

    key: public key that must have signed the table; None: no signature is required
    built: the recipe's own candidate

    Raises DataError for a table of another model, and for modules too short to time; and what
    measure.table.read raises.
    """
    document = table.read(file, key)
    own = _describe(built)
    if document.get("form") != own:
        differing = [n for n in own if (document.get("form") or {}).get(n) != own[n]]
        raise DataError(
            f"it was measured for another {', '.join(differing)}",
            where=str(file),
            accepted="the table that `optimize measure` writes for this recipe",
            fix="Measure this recipe on that machine: optimize measure RECIPE --out table.json.",
        )
    own, full = (_profile(document, name, file) for name in ("modules", "float"))
    typical = median(own[name] for name in own if name in full)
    if typical < LEAST:
        raise DataError(
            f"its modules take {1000 * typical:.0f} microseconds, of which a profile, in whole "
            "microseconds, tells too little",
            where=str(file),
            accepted=f"modules of {1000 * LEAST:.0f} microseconds or more, in the median",
            fix="Give validate.latency a larger first cell, or search on that machine.",
        )
    cell = document["cells"][0]
    machine = document["machine"]["cpu"]
    return KernelTimes(str(file), machine, cell["p50"], cell["forward_p50"], own, full)


def _profile(document: Json, name: str, file: Path) -> dict[str, float]:
    """Return {module: ms} of a profile in a search's table of times. name: "modules" or "float"

    Raises DataError for a time that is negative, infinite or not a number.
    """
    times = {one["module"]: one["ms"] for one in document[name]["modules"]}
    for module, ms in times.items():
        if isinstance(ms, bool) or not isinstance(ms, int | float) or not 0 <= ms < math.inf:
            raise DataError(
                f"module {module or 'without a name'} takes {ms!r:.40} ms",
                where=f"{file}: {name}",
                accepted="a number, 0 or more",
                fix="Measure again: optimize measure RECIPE --out table.json.",
            )
    return times
