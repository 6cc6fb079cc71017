"""Train the ViT of recipes/vit-fashion-int8.yaml on Fashion-MNIST, into artifacts/fashion-vit.

    python calibration/make_fashion.py             # first
    python calibration/train_fashion_vit.py        # minutes on two cores; done once

A transformers folder: four blocks of width 128 on 16 patches of 7 x 7 grey pixels, 0.8 million
parameters. It is not trained again while the folder says it was made by this very file.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make_fashion import INSTALLED, read
from PIL import Image
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

OUT = Path(__file__).parent.parent / "artifacts" / "fashion-vit"
DIGEST = "made_by.sha256"
NAMES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag")
LABELS = (*NAMES, "Ankle boot")
MEAN, STD = 0.286, 0.353  # of the training pixels, 0 to 1
EPOCHS, BATCH, RATE = 1, 100, 1.5e-3


def model() -> ViTForImageClassification:
    torch.manual_seed(0)
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            image_size=28,
            patch_size=7,
            num_channels=1,
            id2label=dict(enumerate(LABELS)),
            label2id={name: i for i, name in enumerate(LABELS)},
        )
    )


def pixels(split: str, side: int = 28) -> tuple[Tensor, Tensor]:
    """(images normalized (n, 1, side, side), labels). side: larger ones as Pillow resizes them."""
    images, labels = read(INSTALLED, split)
    if side != images.shape[1]:
        images = np.stack(
            [Image.fromarray(i).resize((side, side), Image.Resampling.BILINEAR) for i in images]
        )
    scaled = (torch.from_numpy(images.copy()).float() / 255 - MEAN) / STD
    return scaled[:, None], torch.from_numpy(labels.astype("int64"))


def accuracy(trained: Any, split: str, side: int = 28) -> float:
    images, labels = pixels(split, side)
    with torch.no_grad():
        right = [
            (trained.eval()(i).logits.argmax(1) == k).sum()
            for i, k in zip(images.split(500), labels.split(500), strict=True)
        ]
    return float(torch.stack(right).sum() / len(labels))


def train(trained: Any, side: int = 28) -> None:
    """AdamW with one cycle of the rate; images are flipped at random."""
    images, labels = pixels("train", side)
    draw = torch.Generator().manual_seed(1)
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(trained.parameters(), RATE, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.2)
    for epoch in range(EPOCHS):
        started, losses = time.monotonic(), []
        trained.train()
        for rows in torch.randperm(len(images), generator=draw).split(BATCH):
            flipped = torch.rand(len(rows), 1, 1, 1, generator=draw) < 0.5
            batch = torch.where(flipped, images[rows].flip(3), images[rows])
            loss = cross_entropy(trained(batch).logits, labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rate.step()
            losses.append(float(loss.detach()))
            if len(losses) % 50 == 0:
                took, recent = time.monotonic() - started, sum(losses[-50:]) / 50
                at = f"epoch {epoch + 1}/{EPOCHS}, step {len(losses)}"
                print(f"{at}: loss {recent:.3f}, {took:.0f} s")


def main() -> None:
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    if (OUT / DIGEST).is_file() and (OUT / DIGEST).read_text() == own:
        print(f"{OUT} was made by this file")
        return
    trained = model()
    train(trained)
    shutil.rmtree(OUT, ignore_errors=True)
    trained.save_pretrained(OUT)
    size = {"height": 28, "width": 28}
    ViTImageProcessorPil(size=size, image_mean=[MEAN], image_std=[STD]).save_pretrained(OUT)
    (OUT / DIGEST).write_text(own)
    print(f"{OUT}: {accuracy(trained, 'calibrate'):.4f} of images right that it did not see")


if __name__ == "__main__":
    main()
