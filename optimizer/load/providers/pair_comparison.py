"""Compare our reading of a pair of images and texts with transformers' own.

compared   logits of images of random pixels, or vectors of such images or of texts: the written
           checkpoint in torch, through the harness, beside the whole pair in float32. transformers'
           pipeline for zero-shot classification of images gives the logits; get_image_features and
           get_text_features, divided by their norm, the vectors
limit      a tolerance bound of the distance between two runs in float32, from the errors of ours
           against float64
caught     another template, temperature, bias, order of labels, padding or length of texts:
           tests/load/test_pairs.py
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
from optimizer.harness.inputs.text import TEXT
from optimizer.load.config.model_folder import model_folder
from optimizer.load.preparation import Described
from optimizer.load.providers.pairs import is_pair
from optimizer.load.tokenizer.tokenizer import TEXTS
from optimizer.model.architectures.towers import TOWERS
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import load_torch_model

IMAGES = 8

Values = NDArray[np.float32]


def compare(d: Described, out: Path) -> None:
    """Check at load our reading of a pair of image and text encoder: raise CheckpointError where an
    image gets other logits, or an input another vector, than from transformers. A folder of one
    side alone has nothing to compare with.

    out: folder that load wrote
    """
    folder = model_folder(d.root)
    if d.config.model_type not in TOWERS or not is_pair(read_json(folder / "config.json")):
        return
    contract = contracts.read(out / "contract.json")
    noun, what = contract.input_kind, "logit" if d.task.names_labels else "vector"
    inputs = _texts(contract) if noun == TEXT.name else _images(contract)
    encoder = d.task.inputs.open(out / "checkpoint", contract)
    theirs = _logits(d, inputs) if d.task.names_labels else _vectors(d, folder, contract, inputs)
    model = load_torch_model(open_checkpoint(out), contract.task)
    mine = _ours(contract, encoder, model, inputs)
    errors = (mine - _ours(contract, encoder, model.double(), inputs)).ravel()
    both = np.concatenate([errors, -errors]).tolist()
    limit = max(2 * normal_bound(both, len(errors)), UNIT["fp32"] * float(np.abs(mine).max()))
    apart = np.abs(mine - theirs)
    if not apart.max() <= limit:
        row, column = np.unravel_index(int(np.argmax(apart)), apart.shape)
        labels = contract.labels or ()
        place = f"for label {labels[int(column)]!r}" if labels else f"at place {int(column)}"
        raise CheckpointError(
            f"{noun} {int(row) + 1} gets the {what} {mine[row, column]:.6g} {place}, and "
            f"{theirs[row, column]:.6g} in transformers (rounding alone may do {limit:.2g})",
            where=str(d.root),
            accepted="a pair that is read as transformers reads it",
            fix="Report its architecture, its processor and its tokenizer.",
        )
    say(
        f"load: {len(inputs)} {noun}s have the {what}s of transformers' {d.config.model_type} "
        f"(apart by at most {apart.max():.2g}; rounding alone may do {limit:.2g})"
    )


def _images(contract: Contract) -> list[Any]:
    """Draw images of random pixels for load's comparison of a pair, of sizes that are resized and
    cropped."""
    rng, settings = np.random.default_rng(0), contract.images
    sizes = [(settings.height + 7 * i, settings.width + 5 * (i % 3)) for i in range(IMAGES)]
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]


def _texts(contract: Contract) -> list[Any]:
    """Make texts of several lengths for load's comparison of a pair, one of more tokens than the
    model reads."""
    texts = [text for text in TEXTS if text]
    return [*texts, " ".join(texts * contract.text.max_length)]


def _ours(contract: Contract, encoder: Any, model: nn.Module, inputs: list[Any]) -> Values:
    """Compute for load's comparison of a pair the harness's values (inputs, numbers), in the float
    type of the model."""
    task, kind = tasks.look_up(contract), next(model.parameters()).dtype
    batch = tasks.encode(contract, encoder, inputs)
    arrays = {name: torch.from_numpy(a) for name, a in batch.items()}
    with torch.no_grad():
        output = model(**{n: a.to(kind) if a.is_floating_point() else a for n, a in arrays.items()})
    raw = getattr(output, task.output).numpy()
    if task.names_labels:
        return np.asarray(raw)
    return np.asarray(task.decode(contract, raw, batch.real))


def _logits(d: Described, images: list[Any]) -> Values:
    """Compute for load's comparison of a pair transformers' zero-shot logits (images, labels) in
    float32."""
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


def _vectors(d: Described, folder: Path, contract: Contract, inputs: list[Any]) -> Values:
    """Compute for load's comparison of a pair transformers' vectors (inputs, width) of texts or
    images, normalized if ours are."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    with quiet():
        pair: Any = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        if contract.input_kind == TEXT.name:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            length = TOWERS[d.config.model_type].padded_to
            batch = tokenizer(
                inputs,
                padding=True if length is None else "max_length",
                truncation=True,
                max_length=length or contract.text.max_length,
                return_tensors="pt",
            )
            batch.pop("token_type_ids", None)
        else:
            reader = AutoImageProcessor.from_pretrained(
                folder, backend="pil", local_files_only=True
            )
            batch = reader(images=[Image.fromarray(i) for i in inputs], return_tensors="pt")
    read = pair.get_text_features if contract.input_kind == TEXT.name else pair.get_image_features
    with torch.no_grad():
        vectors = read(**batch).pooler_output
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    return np.asarray((unit if contract.normalize else vectors).numpy())
