"""Train the ResNet of recipes/resnet-fashion-int8.yaml on Fashion-MNIST, into
artifacts/fashion-resnet.

    python calibration/make_fashion.py             # first
    python calibration/train_fashion_resnet.py     # minutes on one core; done once

A transformers folder: two stages of two basic blocks, of 64 and 128 channels, 0.7 million
parameters. Images are enlarged to 40 x 40, so that the stem leaves 10 x 10 places to the blocks.
Trained as the ViT is. It is not trained again while the folder says it was made by this very file.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch
from train_fashion_vit import DIGEST, LABELS, MEAN, STD, accuracy, train
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

OUT = Path(__file__).parent.parent / "artifacts" / "fashion-resnet"
SIDE = 40


def model() -> ResNetForImageClassification:
    torch.manual_seed(0)
    return ResNetForImageClassification(
        ResNetConfig(
            num_channels=1,
            embedding_size=64,
            hidden_sizes=[64, 128],
            depths=[2, 2],
            layer_type="basic",
            id2label=dict(enumerate(LABELS)),
            label2id={name: i for i, name in enumerate(LABELS)},
        )
    )


def main() -> None:
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (OUT / DIGEST).is_file() and (OUT / DIGEST).read_text() == own:
        print(f"{OUT} was made by this file")
        return
    trained = model()
    train(trained, SIDE)
    shutil.rmtree(OUT, ignore_errors=True)
    trained.save_pretrained(OUT)
    size = {"height": SIDE, "width": SIDE}
    processor = ViTImageProcessorPil(size=size, resample=2, image_mean=[MEAN], image_std=[STD])
    processor.save_pretrained(OUT)
    (OUT / DIGEST).write_text(own)
    print(f"{OUT}: {accuracy(trained, 'calibrate', SIDE):.4f} of images right that it did not see")


if __name__ == "__main__":
    main()
