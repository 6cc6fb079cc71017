"""A bundle of a hand-made classifier of images, made by the real build and package stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from optimizer.lower import build
from optimizer.package import stage as package
from optimizer.recipe import file as recipe_file
from tests.harness import small_model
from tests.package.bundles import small_bundle
from tests.vision import encoded, picture

TASK = "image-classification"
RECIPE = """\
name: tiny
model: {{source: {model}, task: image-classification}}
quantize:
  method: rtn
  weights: {{bits: 8, granularity: channel}}
targets:
  - {{runtime: onnxruntime, device: cpu, threads: 1}}
validate:
  data:
    source: json
    files: [evaluate.jsonl]
    columns: {{image: image, label: label}}
    labels: [cat, dog, bird]
  metric: accuracy
"""


def write_model(path: Path) -> None:
    """Logits of three labels: the mean of each channel of each quarter, times a matrix."""
    (image,) = small_model.contract(TASK)["inputs"]
    height, width = image["axes"][2:]
    rng = np.random.default_rng(0)
    constants = {
        "flat": np.array([0, -1]),
        "weight": rng.standard_normal((12, 3)).astype(np.float32),
    }
    quarter = [height // 2, width // 2]
    pooled = {"kernel_shape": quarter, "strides": quarter}
    nodes = [
        helper.make_node("AveragePool", ["pixel_values"], ["means"], **pooled),
        helper.make_node("Reshape", ["means", "flat"], ["row"]),
        helper.make_node("MatMul", ["row", "weight"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, image["axes"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def make(folder: Path) -> Path:
    """The bundle's folder."""
    names = ("recipe", "source", "state", "lower", "build", "validate", "package")
    recipe, source, state, model, engine, report, out = (folder / n for n in names)
    for step in (recipe, source / "checkpoint", state, model, engine, report, out):
        step.mkdir(parents=True)
    rows = []
    for i in range(6):
        (recipe / f"{i}.png").write_bytes(encoded(picture(40, 30, seed=i)))
        rows.append({"image": f"{i}.png", "label": ("cat", "dog", "bird")[i % 3]})
    (recipe / "evaluate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (recipe / "recipe.yaml").write_text(RECIPE.format(model=folder / "model"))
    section = recipe_file.read(recipe / "recipe.yaml")
    (source / "contract.json").write_text(json.dumps(small_model.contract(TASK)))
    origin = {"source": "made here", "revision": None, "licence": "apache-2.0", "files": {}}
    (source / "source.json").write_text(json.dumps(origin))
    write_model(model / "model.onnx")
    (model / "lowering.json").write_text(json.dumps({"modules": {}}))
    build.run(section.targets[0], model, out=engine)
    document: dict[str, Any] = {"target": "onnxruntime-cpu", "verdict": "pass"}
    document |= {"gates": [], "ledger": [], "modules": []}
    document["sense"] = small_bundle.sensed(section, source)
    (report / "report.json").write_text(json.dumps(document))
    steps = source, state, model, engine, report
    small_bundle.judge(section, steps)
    package.run(section.packaging, *small_bundle.inputs(section, steps), out=out)
    return out / "bundle"
