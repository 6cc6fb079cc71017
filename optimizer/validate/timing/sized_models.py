"""Make the model of given sizes as the target runs it, to time it.

The first blocks and units are kept: which ones does not matter for speed. The stages' own functions
do the work, so the timed model is the one that they would make of a checkpoint of these sizes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from optimizer.compress.stage import run as compress
from optimizer.compress.walk.model_source import open_source
from optimizer.export.stage import run as export
from optimizer.foundation.atomic import finish
from optimizer.foundation.errors import MachineError
from optimizer.lower.build import run as build
from optimizer.lower.stage import run as lower
from optimizer.recipe.schema import Compression, Latencies
from optimizer.reduce.structure.depth import RemovedBlock
from optimizer.reduce.structure.layout import BlockChoice, ReducedCheckpoint
from optimizer.reduce.structure.sizes import Sizes
from optimizer.reduce.structure.write import write
from optimizer.validate.timing.latency_gain import ModelFolders


def make_model(
    section: Latencies, layout: ReducedCheckpoint, sizes: Sizes, out: Path
) -> ModelFolders:
    """Make the model of given sizes, as the target runs it, in a new folder `out`.

    layout: layout of the reference
    sizes: numbers of blocks and units to keep

    Raises MachineError where the target cannot be built here.
    """
    partial = out.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    folders = [partial / name for name in ("base", "state", "graph", "model", "engine")]
    base, state, graph, model, engine = folders
    for folder in folders:
        folder.mkdir(parents=True)
    if sizes == layout.model.full:
        shutil.copytree(layout.folder, base, dirs_exist_ok=True)
    else:
        write_first_units(layout, sizes, base)
    compress(_matching(section.compression, base), base, state)
    if section.target.export is None:
        graph = base
    else:
        export(section.target.export, base, state, out=graph)
    lower(section.target, base, state, graph, out=model)
    build(section.target, model, out=engine)
    document = json.loads((engine / "engine.json").read_text(encoding="utf-8"))
    if document["deferred"]:
        raise MachineError(
            f"the target is not built here, so nothing can be timed: {document['why']}",
            where="reduce.measure_on",
            fix="Run it where the target runs, or use goal: {keep: ...}.",
        )
    for folder in (state, graph, engine):
        shutil.rmtree(folder, ignore_errors=True)
    finish(partial, out)
    return list_model_folders(out)


def _matching(section: Compression, source: Path) -> Compression:
    """Copy `section` without the patterns that match no module of the checkpoint in `source`,
    because removed blocks have none."""
    model = open_source(section.task, source).model
    names = [name for name, _ in model.named_modules()]

    def there(patterns: Sequence[str]) -> tuple[str, ...]:
        return tuple(p for p in patterns if any(fnmatchcase(name, p) for name in names))

    quantize = section.quantize
    rules = (rule.model_copy(update={"modules": there(rule.modules)}) for rule in quantize.layers)
    kept = {
        "keep_float": there(quantize.keep_float),
        "layers": tuple(rule for rule in rules if rule.modules),
    }
    if not isinstance(quantize.fold_only, bool):
        kept["fold_only"] = there(quantize.fold_only)
    return section.model_copy(update={"quantize": quantize.model_copy(update=kept)})


def list_model_folders(folder: Path) -> ModelFolders:
    """Return the folders of a smaller model that make_model wrote below `folder` to be timed."""
    return ModelFolders(folder / "base", folder / "model")


def write_first_units(layout: ReducedCheckpoint, sizes: Sizes, out: Path) -> None:
    """Write the checkpoint of the first blocks with the first of their units."""
    counts = {"ffn": sizes.ffn, "heads": sizes.heads}
    choices = []
    for block in layout.blocks[: sizes.blocks]:
        parts = layout.parts(block)
        units = {p.kind: torch.arange(counts[p.kind]) for p in parts if counts[p.kind] < p.count}
        choices.append(BlockChoice(block, units, {}))
    write(layout, choices, [RemovedBlock(b, 0.0) for b in layout.blocks[sizes.blocks :]], out)
