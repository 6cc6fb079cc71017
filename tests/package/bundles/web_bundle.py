"""A bundle of the small model with a page for browsers, by the real package stage from hand-made
folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optimizer.lower.web.build import FOLDERS
from optimizer.lower.web.lower import FLOAT
from optimizer.package import stage as package
from tests.harness import small_model
from tests.package.bundles import small_bundle

ORT = small_bundle.ORT
WEB = "{runtime: onnxruntime-web}"
LIMIT = 2e-5
"""Of the small model, which quantizes once: its integers are alike but for ties, and what follows
is float32."""


def standins(folder: Path) -> Path:
    """Write empty files with the names of the fetched ones."""
    for name, npm in FOLDERS.items():
        (folder / "web" / name).mkdir(parents=True)
        for written in npm.files.values():
            (folder / "web" / name / written).write_text("")
    return folder


def classify(path: Path, labels: Sequence[str] | None) -> None:
    """As many logits as labels: the first of the mean over the sequence."""
    if labels is None:
        return
    model = onnx.load(path)
    for name, value in (("first", [0]), ("last", [len(labels)]), ("axis", [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    model.graph.node.extend(
        [
            helper.make_node("ReduceMean", ["last_hidden_state", "axis"], ["pooled"], keepdims=0),
            helper.make_node("Slice", ["pooled", "first", "last", "axis"], ["logits"]),
        ]
    )
    model.graph.output.pop()
    shape = ["batch", len(labels)]
    model.graph.output.append(helper.make_tensor_value_info("logits", TensorProto.FLOAT, shape))
    onnx.save(model, path)


def make(
    folder: Path,
    fetched: Path | None = None,
    *,
    include_float: bool = True,
    limit: float | None = LIMIT,
    **contract: Any,
) -> Path:
    """The bundle's folder. fetched: the build stage's folder; None: empty files. contract: what is
    other than in the small model's."""
    asked = small_bundle.recipe(folder / "recipe", (ORT, WEB))
    steps = small_bundle.steps(folder / "steps", small_bundle.recipe(folder / "one", (ORT,)))
    (steps[0] / "contract.json").write_text(json.dumps(small_model.contract(**contract)))
    model, built, report = (folder / name for name in ("lower", "build", "validate"))
    labels = contract.get("labels")
    classify(steps[2] / "model.onnx", labels)
    shutil.copytree(steps[2], model)
    if include_float:
        classify(small_model.model(model / FLOAT / "model.onnx"), labels)
    if fetched is None:
        standins(built)
    else:
        shutil.copytree(fetched, built)
    engine = {"engine": None, "deferred": False, "why": "", "fit": {}, "fallbacks": []}
    (built / "engine.json").write_text(json.dumps(engine))
    report.mkdir()
    outputs = {o["name"]: {"limit": limit} for o in small_model.contract(**contract)["outputs"]}
    ledger = [{"hop": hop, "spread": {"outputs": outputs}} for hop in ("engine", "export")]
    document = {"target": "onnxruntime-web", "verdict": "pass", "gates": [], "modules": []}
    document |= {"ledger": ledger, "sense": small_bundle.sensed(asked, steps[0])}
    (report / "report.json").write_text(json.dumps(document))
    out = folder / "package"
    out.mkdir()
    steps += [model, built, report]
    small_bundle.judge(asked, steps)
    package.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)
    return out / "bundle"
