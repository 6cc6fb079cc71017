"""Make artifacts/photographs/*.parquet: crops of 25 photographs that PyPI packages carry.

    python calibration/make_efficientnet_lite0.py     # first: the model that labels them
    python calibration/make_photographs.py            # two minutes

| split     | photographs                                   | crops |
|-----------|-----------------------------------------------|-------|
| calibrate | 5 of scikit-image (public domain, CC0)        | 250   |
| time      | the same, other crops                         | 64    |
| evaluate  | the 20 of foolbox (MIT), each of its own class| 1,200 |

A crop has 35 to 100 % of the area, is mirrored half of the time, and its brightness, contrast and
colour are up to a fifth more or less; it is a JPEG whose shorter side is 256. The label of one is
what EfficientNet-Lite0 answers in float, so that accuracy is the share of answers that stay the
same; evaluate-true.parquet has the 20 files as they are, with their own labels. They are not made
again while the folder says that this very file made them, for the same model.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import wheels
from PIL import Image, ImageEnhance

ARTIFACTS = Path(__file__).parent.parent / "artifacts"
OUT, MODEL = ARTIFACTS / "photographs", ARTIFACTS / "efficientnet-lite0"
OF_SCIKIT_IMAGE = {  # {file: the start of its sha256}
    "skimage/data/astronaut.png": "88431cd9653ccd53",
    "skimage/data/chelsea.png": "596aa1e7cb875eb7",
    "skimage/data/coffee.png": "cc02f8ca188b167c",
    "skimage/data/motorcycle_left.png": "db18e9c415761740",
    "skimage/data/rocket.jpg": "c2dd0de7c538df8d",
}
PACKAGES = ("scikit-image==0.26.0", "foolbox==3.3.4")
CROPS = {"calibrate": 50, "time": 13, "evaluate": 60}  # of each photograph
TIMED = 64
SHORTER = 256
BATCH = 50
DIGEST = "made_by.sha256"


def photographs() -> tuple[list[bytes], list[bytes], list[int]]:
    """Read the files of scikit-image, those of foolbox, and the classes of the latter."""
    scikit, foolbox = map(wheels.opened, PACKAGES)
    ours = [wheels.read(scikit, n, digest) for n, digest in OF_SCIKIT_IMAGE.items()]
    names = sorted(n for n in foolbox.namelist() if n.startswith("foolbox/data/imagenet_"))
    classes = [int(Path(n).stem.rpartition("_")[2]) for n in names]
    return ours, [foolbox.read(n) for n in names], classes


def picture(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def crop(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Cut a random part, mirror it at random, and change its colours slightly."""
    width, height = image.size
    area, ratio = rng.uniform(0.35, 1.0), np.exp(rng.uniform(-1, 1) * np.log(4 / 3))
    w = min(width, round(float(np.sqrt(area * width * height * ratio))))
    h = min(height, round(float(np.sqrt(area * width * height / ratio))))
    x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    part = image.crop((x, y, x + w, y + h))
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        part = change(part).enhance(float(rng.uniform(0.8, 1.2)))
    shrink = SHORTER / min(part.size)
    return part.resize((round(w * shrink), round(h * shrink)), Image.Resampling.BICUBIC)


def jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=92)
    return stream.getvalue()


def answers(files: list[bytes]) -> list[int]:
    """Compute the float model's answer to each file."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained(MODEL, backend="pil")
    model = AutoModelForImageClassification.from_pretrained(MODEL, trust_remote_code=True).eval()
    classes: list[int] = []
    for start in range(0, len(files), BATCH):
        images = [picture(f) for f in files[start : start + BATCH]]
        with torch.no_grad():
            logits = model(**processor(images, return_tensors="pt")).logits
        classes += logits.argmax(1).tolist()
    return classes


def write(split: str, files: list[bytes], labels: list[int]) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    OUT.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table({"image": files, "label": labels}), OUT / f"{split}.parquet")
    print(f"{OUT / split}.parquet: {len(files)} images")


def main() -> None:
    own = hashlib.sha256(Path(__file__).read_bytes() + (MODEL / "model.safetensors").read_bytes())
    if (OUT / DIGEST).is_file() and (OUT / DIGEST).read_text() == own.hexdigest():
        print(f"{OUT} was made by this file")
        return
    ours, theirs, classes = photographs()
    for seed, (split, count) in enumerate(CROPS.items()):
        rng = np.random.default_rng(seed)
        sources = map(picture, theirs if split == "evaluate" else ours)
        files = [jpeg(crop(image, rng)) for image in sources for _ in range(count)]
        files = files[:TIMED] if split == "time" else files
        write(split, files, answers(files))
    write("evaluate-true", theirs, classes)
    (OUT / DIGEST).write_text(own.hexdigest())


if __name__ == "__main__":
    main()
