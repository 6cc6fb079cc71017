"""A bundle that embeds images and texts, of a small pair, made by the whole pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from optimizer import pipeline
from optimizer.recipe import file as recipe_file
from optimizer.store import Store
from tests.conftest import sentences
from tests.load.test_pairs import PADDED, write
from tests.vision import encoded, picture

PAIRS, OTHERS = 56, 8
RECIPE = """\
name: tiny
model: {{source: {model}, task: image-text-embedding}}
calibrate: {{data: {{source: json, files: [calibrate.jsonl], columns: {{image: image}}}}}}
quantize: {quantize}
targets:
  - {{runtime: onnxruntime, threads: 1}}
validate:
  data: {{source: json, files: [evaluate.jsonl], columns: {{image: image, text_pair: caption}}}}
  metric: recall_at_5
  max_drop: 0.4
  quantization_budget: 0.5
  latency: &latency {{iterations: 5, max_seconds: 0, must_beat_float: false, sequence: [16]}}
texts:
  calibrate: {{data: {{source: json, files: [captions.jsonl]}}}}
  quantize: {quantize}
  target: {{runtime: onnxruntime, threads: 1}}
  validate:
    data: {{source: json, files: [evaluate.jsonl], columns: {{text: caption}}}}
    metric: cosine
    max_drop: 0.4
    quantization_budget: 0.5
    latency: *latency
package: {{tar: false}}
"""
QUANTIZE = "{method: rtn, weights: {bits: 8}, activations: {bits: 8, granularity: tensor}}"


def inputs(model: Path, kind: str, texts: list[str], images: list[Any]) -> tuple[Any, Any]:
    """Inputs of the pair, by transformers' tokenizer and image processor."""
    from transformers import AutoImageProcessor, AutoTokenizer

    read = AutoTokenizer.from_pretrained(model)
    batch = read(texts, truncation=True, return_tensors="pt", **PADDED[kind])
    batch.pop("token_type_ids", None)
    seen = AutoImageProcessor.from_pretrained(model, backend="pil")
    return batch, seen(images=images, return_tensors="pt")


def vectors(model: Path, kind: str, texts: list[str], images: list[Any]) -> tuple[Any, Any]:
    """transformers' vectors of texts and of images, of unit length."""
    from transformers import AutoModel

    both = AutoModel.from_pretrained(model)
    batch, pixels = inputs(model, kind, texts, images)
    with torch.no_grad():
        found = both.get_text_features(**batch), both.get_image_features(**pixels)
    text, image = (v / v.norm(dim=1, keepdim=True) for v in (o.pooler_output for o in found))
    return text.numpy(), image.numpy()


def fit(model: Path, kind: str, texts: list[str], images: list[Any]) -> None:
    """Change the last layer of one side by ridge regression, so that each text is near its image:
    of CLIP the projection of images, of SigLIP the head of texts."""
    from transformers import AutoModel

    both = AutoModel.from_pretrained(model)
    batch, pixels = inputs(model, kind, texts, images)
    with torch.no_grad():
        if kind == "clip":
            layer, x = both.visual_projection, both.vision_model(**pixels).pooler_output
            y = both.get_text_features(**batch).pooler_output
        else:
            layer, x = both.text_model.head, both.text_model(**batch).last_hidden_state[:, -1]
            y = both.get_image_features(**pixels).pooler_output
        y = y / y.norm(dim=1, keepdim=True)
        mean = x.mean(0) * (layer.bias is not None)
        x = x - mean
        ridge = 1e-3 * x.square().sum() / x.shape[1] * torch.eye(x.shape[1])
        weight = torch.linalg.solve(x.T @ x + ridge, x.T @ (y - y.mean(0))).T
        layer.weight.copy_(weight)
        if layer.bias is not None:
            layer.bias.copy_(-weight @ mean)
    both.save_pretrained(model)


def write_recipe(folder: Path, kind: str) -> Path:
    """recipe.yaml with its pair and data."""
    folder.mkdir(parents=True)
    model = write(folder / "pair", kind)
    shown = [picture(40, 40, seed=i) for i in range(PAIRS + OTHERS)]
    for i, image in enumerate(shown):
        (folder / f"{i}.png").write_bytes(encoded(image))
    texts = sentences(PAIRS, seed=3)
    fit(model, kind, texts, shown[:PAIRS])
    files = {
        "evaluate": [{"image": f"{i}.png", "caption": t} for i, t in enumerate(texts)],
        "calibrate": [{"image": f"{PAIRS + i}.png"} for i in range(OTHERS)],
        "captions": [{"text": t} for t in sentences(16, seed=5)],
    }
    for name, some in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, quantize=QUANTIZE))
    return folder / "recipe.yaml"


def make(folder: Path, kind: str) -> Path:
    """The bundle's folder, beside `pair`."""
    recipe = recipe_file.read(write_recipe(folder, kind))
    outcome = pipeline.run(recipe, Store(folder / "store"))
    assert outcome.bundle is not None, [b.report.path for b in outcome.built]
    return outcome.bundle.path / "bundle"
