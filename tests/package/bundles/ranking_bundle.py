"""A bundle of a hand-made ranker of texts, or of a sparse embedding, made by the real build and
package stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, save

from optimizer.lower import build
from optimizer.package import stage as package
from optimizer.recipe import file as recipe_file
from tests.conftest import sentences
from tests.harness import small_model
from tests.package.bundles import small_bundle

TASK = "text-ranking"
RECIPE = """\
name: tiny
model: {{source: {model}, task: {task}}}
quantize:
  method: rtn
  weights: {{bits: 8, granularity: channel}}
targets:
  - {{runtime: onnxruntime, device: cpu, threads: 1}}
validate:
  data:
    source: json
    files: [evaluate.jsonl]
    columns: {{text: query, text_pair: document, label: relevant}}
  metric: ndcg
"""


def write_model(path: Path, task: str) -> None:
    """One logit: the sum over tokens of a random multiple of 2 ** -16, exact in any batch; of a
    sparse embedding a row of logits per token."""
    rng = np.random.default_rng(0)
    weighs = task == "sparse-embedding"
    count = len(small_model.VOCABULARY)
    numbers = rng.standard_normal((count, count if weighs else 1))
    numbers = np.round(numbers * 2**16) / 2**16
    numbers = numbers.astype(np.float32)
    constants = {"numbers": numbers, "axis1": np.array([1]), "axis2": np.array([2])}
    nodes = [
        helper.make_node("Gather", ["numbers", "input_ids"], ["each"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "axis2"], ["mask3"]),
        helper.make_node("Mul", ["each", "mask3"], ["logits" if weighs else "real"]),
        helper.make_node("ReduceSum", ["real", "axis1"], ["logits"], keepdims=0),
    ]
    nodes = nodes[:-1] if weighs else nodes
    axes = ["batch", "sequence"]
    out = [*axes, count] if weighs else ["batch", 1]
    names = ("input_ids", "attention_mask")
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info(n, TensorProto.INT64, axes) for n in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, out)],
        [numpy_helper.from_array(a, n) for n, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20)]
    save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)


def make(folder: Path, task: str = TASK) -> Path:
    """The bundle's folder."""
    names = ("recipe", "source", "state", "lower", "build", "validate", "package")
    recipe, source, state, model, engine, report, out = (folder / n for n in names)
    for step in (recipe, source / "checkpoint", state, model, engine, report, out):
        step.mkdir(parents=True)
    texts = sentences(12, seed=3)
    rows = [
        {"query": texts[i // 4], "document": texts[3 + i % 9], "relevant": int(i % 4 == 0)}
        for i in range(12)
    ]
    (recipe / "evaluate.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (recipe / "recipe.yaml").write_text(RECIPE.format(model=folder / "model", task=task))
    section = recipe_file.read(recipe / "recipe.yaml")
    small_model.tokenizer(source / "checkpoint")
    (source / "contract.json").write_text(json.dumps(small_model.contract(task)))
    origin = {"source": "made here", "revision": None, "licence": "apache-2.0", "files": {}}
    (source / "source.json").write_text(json.dumps(origin))
    write_model(model / "model.onnx", task)
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
