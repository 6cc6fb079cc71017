"""Draw results/vision.png of README.md: photographs with EfficientNet-Lite0's answers.

    python calibration/make_efficientnet_lite0.py && python calibration/make_photographs.py
    python -m benchmarks.vision.picture

Photographs of scikit-image in the public domain (CC0): Chelsea the cat, by Stéfan van der Walt, and
a cup of coffee, by Rachel Michetti. Both models are files of recipes/efficientnet-lite0-int8.yaml,
run by ONNX Runtime.
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from PIL import Image, ImageDraw, ImageFont

from benchmarks.measure.models import export_float, lower_model
from benchmarks.measure.results import RESULTS, ROOT
from benchmarks.vision.int8 import RECIPE
from calibration import wheels
from optimizer.harness import tasks
from optimizer.harness.contract import Contract, read
from optimizer.harness.tasks import encode
from optimizer.recipe.file import read as read_recipe
from optimizer.store import Store

PACKAGE = "scikit-image==0.26.0"
PHOTOGRAPHS = ("skimage/data/chelsea.png", "skimage/data/coffee.png")
SIDE, WIDTH, LINE, MARGIN = 224, 640, 22, 12
SHOWN = 3  # classes per photograph
COLOURS = {"float": "#8a94a6", "INT8": "#2f6fde"}


def probabilities(model: Path, contract: Contract, photograph: bytes) -> Any:
    """Compute the softmax (labels,) of the logits of one image."""
    encoder = tasks.look_up(contract).inputs.open(model.parent, contract)
    batch = encode(contract, encoder, [photograph])
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], dict(batch))
    powers = np.exp(logits[0] - logits[0].max())
    return powers / powers.sum()


def panel(photograph: bytes, answers: dict[str, Any], labels: list[str]) -> Image.Image:
    """Draw a photograph with bars for the float model's first classes, in float and INT8."""
    made = Image.new("RGB", (WIDTH, SIDE + 2 * MARGIN), "white")
    picture = Image.open(io.BytesIO(photograph)).convert("RGB")
    edge = min(picture.size)
    left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
    square = picture.crop((left, top, left + edge, top + edge)).resize((SIDE, SIDE))
    made.paste(square, (MARGIN, MARGIN))
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(15)
    x, y = SIDE + 3 * MARGIN, MARGIN
    for label in np.argsort(-answers["float"])[:SHOWN]:
        draw.text((x, y), labels[label], fill="black", font=font)
        for name, shares in answers.items():
            y += LINE
            share = float(shares[label])
            draw.text((x, y), name, fill=COLOURS[name], font=font)
            start = x + 48
            draw.rectangle((start, y + 3, start + 2 + 220 * share, y + 16), fill=COLOURS[name])
            draw.text((start + 232, y), f"{100 * share:.1f} %", fill=COLOURS[name], font=font)
        y += LINE + 8
    return made


def main() -> None:
    recipe, store = read_recipe(RECIPE), Store(ROOT / "artifacts" / "store")
    source, lowered = lower_model(recipe, store, None)
    contract = read(source.path / "contract.json")
    labels = list(contract.labels or ())
    photographs = [wheels.opened(PACKAGE).read(name) for name in PHOTOGRAPHS]
    with tempfile.TemporaryDirectory() as folder:
        models = {"float": export_float(source.path, Path(folder)), "INT8": lowered.onnxruntime}
        panels = [
            panel(p, {n: probabilities(m, contract, p) for n, m in models.items()}, labels)
            for p in photographs
        ]
    made = Image.new("RGB", (WIDTH, sum(p.height for p in panels)), "white")
    for i, one in enumerate(panels):
        made.paste(one, (0, i * one.height))
    out = RESULTS / "vision.png"
    made.quantize(128).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
