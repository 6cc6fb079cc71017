"""Compare our reading of a pair of images and texts with transformers' pipeline for zero-shot
classification of images.

compared   logits of images of random pixels: the written checkpoint in torch, through the harness,
           beside the whole pair, which reads the same images and the labels' texts, in float32
limit      a tolerance bound of the distance between two runs in float32, from the errors of ours
           against float64
caught     another template, temperature, bias or order of labels: tests/load/test_pairs.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.rounding.tolerance import UNIT, normal_bound
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.load.preparation import Described
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import torch_model

IMAGES = 8

Logits = NDArray[np.float32]


def check(d: Described, out: Path) -> None:
    """Raise CheckpointError where an image gets other logits than from transformers' pipeline.

    out: folder that load wrote
    """
    if not d.task.names_labels:
        return
    contract = contracts.read(out / "contract.json")
    images = _images(contract)
    theirs = _theirs(d, images)
    model = torch_model(open_checkpoint(out), contract.task)
    mine = _logits(contract, model, images)
    errors = (mine - _logits(contract, model.double(), images)).ravel()
    both = np.concatenate([errors, -errors]).tolist()
    limit = max(2 * normal_bound(both, len(errors)), UNIT["fp32"] * float(np.abs(mine).max()))
    apart = np.abs(mine - theirs)
    if not apart.max() <= limit:
        at = np.unravel_index(int(np.argmax(apart)), apart.shape)
        label = (contract.labels or ())[int(at[1])]
        raise CheckpointError(
            f"an image gets the logit {mine[at]:.6g} for label {label!r}, and {theirs[at]:.6g} in "
            f"transformers' pipeline (rounding alone may do {limit:.2g})",
            where=str(d.root),
            accepted="a pair that is read as transformers reads it",
            fix="Report its architecture and its processor.",
        )
    say(
        f"load: {IMAGES} images have the logits of transformers' zero-shot-image-classification "
        f"(apart by at most {apart.max():.2g}; rounding alone may do {limit:.2g})"
    )


def _images(contract: Contract) -> list[Any]:
    """Images of random pixels, of sizes that are resized and cropped."""
    rng, settings = np.random.default_rng(0), contract.images
    sizes = [(settings.height + 7 * i, settings.width + 5 * (i % 3)) for i in range(IMAGES)]
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def _logits(contract: Contract, model: nn.Module, images: list[Any]) -> Logits:
    """The harness's logits (images, labels), in the float type of the model."""
    batch = tasks.encode(contract, None, images)
    kind = next(model.parameters()).dtype
    with torch.no_grad():
        output = model(**{name: torch.from_numpy(a).to(kind) for name, a in batch.items()})
    logits: Logits = getattr(output, tasks.of(contract).output).numpy()
    return logits


def _theirs(d: Described, images: list[Any]) -> Logits:
    from PIL import Image
    from transformers import (
        AutoImageProcessor,
        AutoModelForZeroShotImageClassification,
        AutoTokenizer,
        ZeroShotImageClassificationPipeline,
    )

    settings = d.section.zero_shot
    assert settings is not None
    folder = d.root
    with quiet():
        pipeline: Any = ZeroShotImageClassificationPipeline(
            model=AutoModelForZeroShotImageClassification.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32
            ),
            tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
            image_processor=AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            ),
            device="cpu",
        )
        rows = [
            pipeline.forward(
                pipeline.preprocess(
                    Image.fromarray(image),
                    list(settings.candidate_labels),
                    settings.template(d.task),
                )
            )["logits"]
            for image in images
        ]
    return np.asarray(np.concatenate([row.detach().numpy() for row in rows]), np.float32)
