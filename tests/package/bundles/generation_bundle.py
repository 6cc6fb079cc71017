"""A bundle of the hand-written decoder, made by the real build and package stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimizer.lower import build
from optimizer.package import stage as package
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from tests.conftest import write_rows
from tests.decoders import write_decoder_tokenizer
from tests.harness import tiny_decoder
from tests.made_once import once
from tests.package.bundles import small_bundle

RECIPE = """\
name: tiny-decoder
model: {{source: {model}, task: text-generation}}
quantize:
  method: rtn
  weights: {{bits: 8, granularity: channel}}
targets:
  - {{runtime: onnxruntime, device: cpu, threads: 1}}
validate:
  data: {{source: json, files: [evaluate.jsonl]}}
  metric: perplexity
  sequence_length: 16
  latency:
    data: {{source: json, files: [time.jsonl]}}
    sequence: [8]
    new_tokens: 4
    iterations: 5
    must_beat_float: false
"""


def recipe(folder: Path) -> Recipe:
    """A recipe of text-generation; the model it names is not read here."""
    folder.mkdir(parents=True)
    write_rows(folder / "evaluate.jsonl", 64, seed=2)
    write_rows(folder / "time.jsonl", 8, seed=3)
    (folder / "recipe.yaml").write_text(RECIPE.format(model=folder / "model"))
    return recipe_file.read(folder / "recipe.yaml")


def make(folder: Path, cache: str = "new", **generation: Any) -> Path:
    """The bundle's folder. cache: as tiny_decoder has it. generation: changes to the contract."""
    return _packaged(folder, cache, **generation) / "package" / "bundle"


@once
def _packaged(folder: Path, cache: str, **generation: Any) -> None:
    asked = recipe(folder / "recipe")
    source, state, model, engine, report, out = (
        folder / n for n in ("source", "state", "lower", "build", "validate", "package")
    )
    for step in (source, state, model, engine, report, out):
        step.mkdir()
    vocabulary = write_decoder_tokenizer(source / "checkpoint")
    contract = tiny_decoder.contract(vocabulary, **generation).to_json()
    (source / "contract.json").write_text(json.dumps(contract))
    origin = {"source": "made here", "revision": None, "licence": "apache-2.0", "files": {}}
    (source / "source.json").write_text(json.dumps(origin))
    tiny_decoder.write_onnx(model / "model.onnx", vocabulary, cache)
    (model / "lowering.json").write_text(json.dumps({"modules": {}}))
    build.run(asked.targets[0], model, out=engine)
    verdict: dict[str, Any] = {
        "target": "onnxruntime-cpu",
        "verdict": "pass",
        "gates": [],
        "ledger": [],
    }
    verdict["sense"] = small_bundle.sensed(asked, source)
    (report / "report.json").write_text(json.dumps({**verdict, "modules": []}))
    steps = source, state, model, engine, report
    small_bundle.judge(asked, steps)
    package.run(asked.packaging, *small_bundle.inputs(asked, steps), out=out)
