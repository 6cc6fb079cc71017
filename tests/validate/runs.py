"""Artefacts of real runs of the stages, to be proven or damaged."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.export.stage import STAGE as EXPORT
from optimizer.harness.inputs.batch import Batch
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.build import STAGE as BUILD
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import (
    OpenVinoTarget,
    Recipe,
    Shapes,
    TargetSection,
    TensorRTTarget,
    Validation,
)
from optimizer.store import Artifacts
from optimizer.validate import target_runner
from optimizer.validate.ledger import ledger
from optimizer.validate.materials import Materials
from tests.conftest import sentences, write_rows

SCHEMES: dict[str, dict[str, Any]] = {
    "static": {"activations": {"range": "minmax"}},
    "smooth": {
        "method": "smoothquant",
        "activations": {"range": "mse"},
        "bias_correction": True,
    },
    "token": {"activations": {"granularity": "token"}},
    "w8": {},
    "w4": {"weights": {"bits": 4, "granularity": "group", "group_size": 32}},
    "w4a8": {
        "weights": {"bits": 4, "granularity": "group", "group_size": 32},
        "activations": {"range": "minmax"},
    },
}
FOLDERS = ("source", "state", "graph", "model", "engine")


@dataclass(frozen=True)
class Run:
    """The folders the validate stage reads, below `root`."""

    root: Path
    section: Validation

    def folder(self, name: str) -> Path:
        return self.root / name

    @property
    def artifacts(self) -> Artifacts[Path]:
        return Artifacts(*(self.root / name for name in FOLDERS))

    def materials(self, bundle: Path | None = None) -> Materials:
        texts = sentences(12, seed=9)
        return Materials(
            self.section, *(self.root / f for f in FOLDERS), texts=texts, bundle=bundle
        )

    def copy(self, root: Path) -> Run:
        """A run of its own, free to be damaged."""
        for name in FOLDERS:
            shutil.copytree(self.root / name, root / name)
        return replace(self, root=root)


def recipe(model: str, data: Path, quantize: dict[str, Any], task: str, **validate: Any) -> Recipe:
    """A recipe on data files made in `data`, with budgets that a tiny random model keeps."""
    for name, count, seed in (("calibrate", 16, 1), ("evaluate", 64, 2), ("time", 8, 3)):
        write_rows(data / f"{name}.jsonl", count, seed)

    def rows(name: str, **columns: str) -> dict[str, Any]:
        return {
            "source": "json",
            "files": (str(data / f"{name}.jsonl"),),
            "columns": {"text": "text", **columns},
        }

    needs = "activations" in quantize
    target = {"runtime": "onnxruntime", "threads": 1}
    if needs and quantize.get("weights", {}).get("granularity") == "group":
        target["allow_precision_fallback"] = True
    document = {
        "name": "tiny",
        "model": {"source": model, "task": task},
        "quantize": quantize,
        "targets": (target,),
        "validate": {
            "data": rows("evaluate", label="label"),
            "metric": "cosine",
            "max_drop": 0.1,
            "quantization_budget": 0.5,
            "latency": {
                "data": rows("time"),
                "sequence": (16,),
                "iterations": 5,
                "must_beat_float": False,
            },
            **validate,
        },
    }
    if needs:
        document["calibrate"] = {"data": rows("calibrate"), "samples": 16, "sequence_length": 32}
    return Recipe.model_validate(document)


def balanced(classifier: Path, folder: Path, texts: list[str]) -> list[int]:
    """Copy a two-label classifier to `folder` with a bias at which half of the texts get either
    label, and return its labels of them: what a random model is right about."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    shutil.copytree(classifier, folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits
        ahead = logits[:, 1] - logits[:, 0]
        middle = ahead.sort().values[len(texts) // 2 - 1 :][:2].mean()  # no text lies on it
        model.classifier.bias[1] -= middle
    model.save_pretrained(folder)
    return [int(a > middle) for a in ahead]


def label(file: Path, labels: list[int]) -> None:
    """Rewrite the labels of a file of rows."""
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    made = [{**r, "label": k} for r, k in zip(rows, labels, strict=True)]
    file.write_text("".join(json.dumps(r) + "\n" for r in made))


def make(
    root: Path, made: Recipe, like: Run | None = None, same: Sequence[str] = ("source", "graph")
) -> Run:
    """Run every stage up to validate. same: the folders that it has in common with the run `like`,
    to save time; by default one whose float graph is the same."""
    target = made.targets[0]
    run = Run(root, made.validation(target))
    for name in FOLDERS:
        if like is None or name not in same:
            (root / name).mkdir(parents=True)
        else:
            shutil.copytree(like.folder(name), root / name)
    source, state, graph, model, engine = (root / f for f in FOLDERS)
    if like is None or "source" not in same:
        LOAD.run(made.model, out=source)
    if like is None or "state" not in same:
        COMPRESS.run(made.compression, source, out=state)
    if target.export and (like is None or "graph" not in same):
        EXPORT.run(target.export, source, state, out=graph)
    LOWER.run(target, source, state, graph, out=model)
    BUILD.run(target, model, out=engine)
    return run


def prove(materials: Materials, first: str = "load") -> Materials:
    """The materials of a run that no hop refuses, with all that torch computed of it.

    first: name of the first hop to run
    """
    entries = [ledger.run_hop(hop, materials) for hop in hops_from(materials, first)]
    unrun = ["engine"] if target_runner.explain_not_run(materials) else []
    assert [e.hop for e in entries if e.ok is None] == unrun
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []
    return materials


def hops_from(materials: Materials, first: str) -> list[ledger.Hop]:
    """The hops of the run's target, from `first` on."""
    hops = ledger.list_hops(materials)
    return list(hops[[hop.__name__ for hop in hops].index(first) :])


READERS = {"state": "fold", "graph": "export", "model": "lower", "engine": "engine"}
"""{folder: the first hop that reads it}"""
OF_SOURCE = (
    *("checkpoint", "contract", "encoder", "family", "float_model", "parameters"),
    *("batches", "float_traces"),
)
OF_STATE = (
    *("state", "corrections", "folded_model", "folded_parameters", "simulated_model"),
    *("folded_traces", "unpruned_traces", "simulated_traces", "names"),
)
OF_EXTREMES = ("extremes", "folded_extremes", "simulated_extremes")


def damaged(clean: Materials, root: Path, edit: Callable[[Run], None]) -> Materials:
    """As `clean`, with a state, a graph, a lowered model and an engine of its own, which `edit`
    changed. What torch computed of folders that it left as they were is that of `clean`."""
    return damage(clean, root, edit)[0]


def damage(clean: Materials, root: Path, edit: Callable[[Run], None]) -> tuple[Materials, str]:
    """(see `damaged`, name of the first hop that reads a folder which `edit` changed)."""
    before = {"state": clean.state_folder, **{n: getattr(clean, n) for n in FOLDERS[2:]}}
    for name, folder in before.items():
        shutil.copytree(folder, root / name)
    edit(Run(root, clean.section))
    changed = [name for name, folder in before.items() if _content(folder) != _content(root / name)]
    first = READERS[changed[0]] if changed else "harness"
    if first == "fold":
        made = replace(clean, state_folder=root / "state")
        _share(clean, made, OF_SOURCE)
    else:
        made = copy.copy(clean)
        for name in ("lowered_graph", "lowered_outputs", "names", "lowering", "inspected"):
            made.__dict__.pop(name, None)
    made.graph, made.model, made.engine = (root / name for name in FOLDERS[2:])
    return made, first


def _content(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def _share(clean: Materials, made: Materials, names: Sequence[str]) -> None:
    made.__dict__ |= {n: clean.__dict__[n] for n in names if n in clean.__dict__}


def first_refused(clean: Materials, root: Path, edit: Callable[[Run], None]) -> str:
    """Name of the hop that refuses a damaged copy of a proven run; "none" where all pass. Hops
    before the first that reads a changed folder are not run again."""
    made, first = damage(clean, root, edit)
    hops = hops_from(made, first)
    return next((h.__name__ for h in hops if ledger.run_hop(h, made).ok is False), "none")


def lowered_again(clean: Materials, run: Run) -> Materials:
    """Materials of `run`, the state of a proven run in another dialect, with what torch computed of
    that. Hops from `lower` on read what differs."""
    folders = {name: run.folder(name) for name in FOLDERS[2:]}
    made = replace(clean, section=run.section, **folders)
    _share(clean, made, (*OF_SOURCE, *OF_STATE))
    assert clean.precision == made.precision
    if all(_equal(a, b) for a, b in zip(clean.extremes, made.extremes, strict=True)):
        _share(clean, made, OF_EXTREMES)
        made.correct._cached |= clean.correct._cached
        made.correct._module_inputs |= clean.correct._module_inputs
    return made


def _equal(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in {*a, *b})


def for_target(run: Run, root: Path, target: TargetSection) -> Run:
    """The run lowered and built for another target."""
    copy = run.copy(root)
    copy = replace(copy, section=copy.section.model_copy(update={"target": target}))
    for name in ("model", "engine"):
        shutil.rmtree(copy.folder(name))
        copy.folder(name).mkdir()
    source, state, graph, model = (copy.folder(f) for f in ("source", "state", "graph", "model"))
    LOWER.run(target, source, state, graph, out=model)
    BUILD.run(target, model, out=copy.folder("engine"))
    return copy


def for_tensorrt(run: Run, root: Path) -> Run:
    """The run lowered and built for TensorRT-RTX instead, its engine not opened."""
    shapes = Shapes(sequence=(4, 16, 64))
    return for_target(
        run, root, TensorRTTarget(runtime="tensorrt-rtx", float="fp32", shapes=shapes)
    )


def for_openvino(run: Run, root: Path, **options: Any) -> Run:
    """The run lowered and built for OpenVINO instead."""
    return for_target(run, root, OpenVinoTarget(runtime="openvino", threads=1, **options))
