"""Read one side of a pair that compares images with texts (CLIP, SigLIP) as a checkpoint.

The task chooses the side. For zero-shot classification of images the other side encodes the labels'
texts here, as transformers' pipeline does; their vectors, times the pair's temperature, become the
weights of a linear layer (model/checkpoint/tower_model.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import faithful, weights
from optimizer.load.config.model_folder import model_folder
from optimizer.load.preparation import Described
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.weights import SourceWeights
from optimizer.model.architectures.towers import PAIRS, TOWERS, Tower, find_tower
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.tower_model import LABELS
from optimizer.recipe.schema import Model

WEIGHTS = (".safetensors", ".bin", ".index.json")
SCALE, BIAS = "logit_scale", "logit_bias"  # parameters of the pair
COMPUTED = (f"{LABELS}.weight", f"{LABELS}.bias")


def takes(section: Model, folder: Path) -> bool:
    """Return True for a checkpoint of a text and an image encoder (a pair, such as CLIP)."""
    del section
    file = folder / "config.json"
    return file.is_file() and is_pair(read_json(file))


def is_pair(raw: Mapping[str, Any]) -> bool:
    """Return True if `raw`, the content of config.json, is of a pair that is covered."""
    return raw.get("model_type") in PAIRS


def config(section: Model, folder: Path) -> Any:
    """The transformers config of the side that the task takes. Raises CheckpointError as
    check_side does."""
    from transformers import AutoConfig

    file = folder / "config.json"
    with reading(file):
        whole = AutoConfig.from_pretrained(folder)
    name, tower = find_tower(whole.model_type, tasks.find_task(section.task).inputs.name)
    side = copy.deepcopy(getattr(whole, tower.side))
    side.architectures = [tower.model]
    if hasattr(whole, "projection_dim"):  # the pair's own decides, as in transformers
        side.projection_dim = whole.projection_dim
    if tasks.find_task(section.task).names_labels and section.zero_shot is not None:
        labels = dict(enumerate(section.zero_shot.candidate_labels))
        side.id2label, side.label2id = labels, {n: i for i, n in labels.items()}
    side.name_or_path = str(folder)
    check_side({**side.to_dict(), "model_type": name}, section, file, whole=True)
    return side


def check_side(raw: Mapping[str, Any], section: Model, file: Path, *, whole: bool = False) -> None:
    """Raise CheckpointError for one side of a pair without its projection, and for a task that does
    not read its vector; other models pass.

    raw: content of config.json
    whole: True where the other side is there too
    """
    tower, task = TOWERS.get(str(raw.get("model_type"))), tasks.find_task(section.task)
    both = task.names_labels or task.reads_texts
    if tower is None and task.reads_texts:
        raise CheckpointError(
            f"{raw.get('model_type')!r} has no side of texts, which task {task.name} needs",
            where=f"{file}: model_type",
            accepted=" or ".join(sorted(PAIRS)),
            fix="Set model.task: image-feature-extraction for images alone.",
        )
    if tower is None:
        return
    fits = whole if both else "pooling" in task.sections
    if not fits:
        raise CheckpointError(
            f"task {task.name} does not read the vector of {raw['model_type']}"
            + (", and its texts need the other side" if both else ""),
            where=f"{file}: model_type",
            accepted="sentence-embedding of texts, image-feature-extraction, or of a folder with "
            "both sides image-text-embedding and zero-shot-image-classification",
        )
    named = [str(n) for n in raw.get("architectures") or [tower.model]]
    if tower.model not in named or raw.get("vision_use_head") is False:
        raise CheckpointError(
            f"{named[0]} has no vector that is compared with the other side's",
            where=f"{file}: architectures",
            accepted=tower.model,
            fix=f"Save it with transformers' {tower.model}.",
        )


def read(section: Model, folder: Path, model_config: Any, out: Path) -> Loaded:
    """The tensors of one side, and of a zero-shot classifier those of its labels. Writes
    config.json and links to the other files."""
    tower = TOWERS[model_config.model_type]
    model_config.save_pretrained(out)
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(WEIGHTS):
            (out / file.name).symlink_to(file.resolve())
    stored = {
        n: s for n, s in weights.find(folder, section).items() if n.startswith(tower.prefixes)
    }
    if tasks.find_task(section.task).names_labels:
        stored |= dict(zip(COMPUTED, _encode_labels(section, folder, tower), strict=True))
    return Loaded(out, stored)


def label_texts(d: Described) -> dict[str, Any]:
    """Build section `label_texts` of contract.json, with the temperature and bias of the pair's
    files."""
    assert d.section.zero_shot is not None
    stored = weights.find(model_folder(d.root), d.section)

    def number(name: str) -> Tensor:
        return weights.read_values(stored[name]).float().reshape(())

    return {
        "hypothesis_template": d.section.zero_shot.template(d.task),
        "scale": float(number(SCALE).exp()),
        "bias": float(number(BIAS)) if BIAS in stored else 0.0,
    }


def _encode_labels(section: Model, folder: Path, tower: Tower) -> tuple[Tensor, Tensor]:
    """Encode a loaded zero-shot classifier's labels: return (weights (labels, width), biases
    (labels,)) by which a vector of unit length gets the logits of the pair. Raises RecipeError for
    a label that is longer than the model reads."""
    from transformers import AutoModelForZeroShotImageClassification, AutoTokenizer

    assert section.zero_shot is not None
    settings = section.zero_shot
    template = settings.template(tasks.find_task(section.task))
    texts = [template.format(label) for label in settings.candidate_labels]
    with reading(folder), quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForZeroShotImageClassification.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        ).eval()
    options: dict[str, Any] = {"padding": True}
    _, reader = find_tower(tower.pair, TEXT.name)
    if reader.padded_to is not None:
        options = {"padding": "max_length", "max_length": reader.padded_to, "truncation": True}
    inputs = tokenizer(texts, return_tensors="pt", **options)
    positions = int(model.config.text_config.max_position_embeddings)
    if inputs["input_ids"].shape[1] > positions:
        longest = max(settings.candidate_labels, key=len)
        raise RecipeError(
            f"a label has more than the {positions} tokens that the model reads with its template",
            where="model.zero_shot.candidate_labels",
            accepted="shorter labels",
            fix=f"Shorten {longest[:60]!r}.",
        )
    with torch.no_grad():
        vectors = model.get_text_features(**inputs).pooler_output
        vectors = vectors / vectors.norm(dim=-1, keepdim=True)
        scaled = vectors * model.logit_scale.exp()
        bias = getattr(model, "logit_bias", None)
        shift = torch.zeros(()) if bias is None else bias.detach().reshape(())
    return scaled.contiguous(), shift.expand(len(texts)).contiguous()


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Check what load wrote: raise OptimizeError naming the first parameter that differs from the
    source."""
    with make_temporary_folder("load") as scratch:
        for file in folder.iterdir():
            if file.is_file() and file.name != "config.json":
                (scratch / file.name).symlink_to(file.resolve())
        (scratch / "config.json").symlink_to((out / "checkpoint" / "config.json").resolve())
        written = open_checkpoint(out).tensors.as_written
        faithful.check(scratch, section, written, pairing, computed=COMPUTED)


PAIR = Provider("pair", takes, read, verify)
