"""Add the model that reads labels of requests to a bundle, and compare it with the image's model.

bundle/texts/   contract.json, tokenizer.json, model.onnx (and model.onnx.data), which
                harness/bundle/label_encoder.py opens

compared   the vectors of the recipe's labels: as the bundle computes them from the labels' names,
           and those that load computed with transformers and wrote into the image's model
limit      a tolerance bound of the distance between two runs in float32, from the errors of the
           model in torch against float64
caught     another template, scale, pooling or tokenizer: tests/package/test_label_texts.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import nn

from optimizer.foundation import atomic
from optimizer.foundation.errors import GateError
from optimizer.foundation.progress import say
from optimizer.foundation.rounding.tolerance import UNIT, normal_bound
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle.label_encoder import CONTRACT, FOLDER, MODEL, LabelEncoder
from optimizer.harness.inputs.batch import Array, Batch
from optimizer.harness.inputs.text import TEXT
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.model.checkpoint.tower_model import LABELS
from optimizer.store import LabelModelSteps

PACKAGES = ("onnxruntime", *TEXT.requires)
"""Packages that the harness imports for it."""


def add(bundle: Path, texts: LabelModelSteps[Path], source: Path) -> None:
    """Copy the text model that reads labels into `bundle`. Raises GateError where they give a label
    of the recipe another vector than the image's model holds.

    source: folder of load of the image's model
    """
    folder = bundle / FOLDER
    folder.mkdir()
    contract = contracts.read(texts.checkpoint / CONTRACT)
    shutil.copyfile(texts.checkpoint / CONTRACT, folder / CONTRACT)
    name = contract.text.file
    shutil.copyfile(texts.checkpoint / "checkpoint" / name, folder / name)
    graphs = sorted(texts.graph.glob(f"{MODEL}*"))
    for file in graphs:
        atomic.copy(file, folder / file.name)
    _compare(bundle, [f"{FOLDER}/{file.name}" for file in graphs], texts, source)


def _compare(bundle: Path, files: list[str], texts: LabelModelSteps[Path], source: Path) -> None:
    """Compare the bundle's vectors of the recipe's labels with those in the image's model.

    files: names of the bundle's files of the model of texts
    source: folder of load of the image's model

    Raises GateError for vectors further apart than rounding explains.
    """
    own = contracts.read(source / CONTRACT)
    settings, labels = own.label_texts, own.labels or ()
    assert settings is not None
    sentences = [settings.hypothesis_template.format(label) for label in labels]
    with LabelEncoder(bundle, files, threads=1) as encoder:
        if problem := encoder.problem(sentences):
            raise GateError(problem, where=f"{FOLDER}/", fix="Shorten or reword the label.")
        actual = encoder.vectors(sentences) * settings.scale
        batch = tasks.encode(encoder.contract, encoder.tokenizer, sentences)
    tensors = open_checkpoint(source).tensors
    expected = tensors[f"{LABELS}.weight"].numpy()
    model = load_torch_model(open_checkpoint(texts.checkpoint), encoder.contract.task)
    errors = settings.scale * (_vectors(model, batch) - _vectors(model.double(), batch)).ravel()
    both = np.concatenate([errors, -errors]).tolist()
    limit = max(2 * normal_bound(both, len(errors)), UNIT["fp32"] * float(np.abs(expected).max()))
    apart = np.abs(actual - expected)
    shift = np.abs(tensors[f"{LABELS}.bias"].numpy() - settings.bias)
    if not (apart.max() <= limit and shift.max() <= UNIT["fp32"] * abs(settings.bias)):
        label = labels[int(apart.max(1).argmax())]
        raise GateError(
            f"the bundle gives label {label!r} a vector that is {apart.max():.2g} away from "
            f"transformers' (rounding alone may do {limit:.2g}), or a bias that is "
            f"{shift.max():.2g} away",
            where=f"{FOLDER}/{MODEL}",
            fix="Run again with --remeasure; if it happens again, report the pair's architecture.",
        )
    say(
        f"package: {len(labels)} labels have transformers' vectors also where a request brings "
        f"them (apart by at most {apart.max():.2g}; rounding alone may do {limit:.2g})"
    )


def _vectors(model: nn.Module, batch: Batch) -> Array:
    """Embed label texts with the bundle's model of texts: its vectors at the last token, scaled to
    unit length.

    Computed in the model's float type; returned as float64, (texts, width).
    """
    with torch.no_grad():
        hidden = model(**{n: torch.from_numpy(a) for n, a in batch.items()}).last_hidden_state
    last = torch.from_numpy(batch.real.sum(1) - 1)
    vectors = hidden[torch.arange(len(last)), last]
    return np.asarray((vectors / vectors.norm(dim=-1, keepdim=True)).double().numpy())
