"""Read a folder of a causal language model that ranks, as sentence-transformers' LogitScore does:

    logit of a pair = logit of the next token "yes" - logit of "no"        (or of "yes" alone)

as a classifier of one label, whose weight is the difference of the head's two rows, so that the
rest of the head is neither stored nor computed. Its sigmoid is the softmax over the two tokens,
which the model card of Qwen3-Reranker computes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import conversions, faithful, source, weights
from optimizer.load.config.model_type import CONFIG
from optimizer.load.providers.provider import Loaded, Provider
from optimizer.load.quantized import folder as quantized
from optimizer.load.sentence import logit_score
from optimizer.load.weights import SourceWeights
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import build_skeleton_from_config, find_tied_names
from optimizer.recipe.schema import Model

SCORE = "score.weight"


def read(section: Model, folder: Path, config: Any, scratch: Path) -> Loaded:
    """Read the tensors of a source folder whose causal language model ranks, without the head and
    with the classifier's weight. Raises CheckpointError as weights.find, and for a head with a
    bias."""
    if quantized.find(folder) is not None or conversions.converts(config.model_type):
        raise CheckpointError(
            "its scores are logits of the language model's head, which is read from float weights "
            "under transformers' names only; these are quantized, or have other names",
            where=str(folder),
            accepted="the float checkpoint of an architecture such as Qwen3, Llama or Gemma",
        )
    generating = tasks.list_generating()[0]
    model: Any = build_skeleton_from_config(config, generating, section.trust_remote_code)
    head = model.get_output_embeddings()
    name = next(n for n, module in model.named_modules() if module is head)
    if head.bias is not None:
        raise CheckpointError(
            f"the head has a bias ({name}.bias), which the classifier of one label lacks",
            where=str(folder),
            accepted="a head without a bias",
        )
    stored = weights.find(folder, section)
    pairing = weights.match(stored, model, section)
    weight = find_tied_names(model).get(f"{name}.weight", f"{name}.weight")
    rows = pairing.read(weight)
    yes, no = logit_score.read_tokens(source.resolve(section).folder, folder, section)
    if max(yes, no or 0) >= len(rows):
        raise CheckpointError(
            f"token {max(yes, no or 0)} has no row in the head of {len(rows)} rows",
            where=str(folder),
        )
    score = rows[yes].float() - (0 if no is None else rows[no].float())
    kept = {n: t for n, t in stored.items() if not f".{n}".endswith(f".{name}.weight")}
    return Loaded(_files(folder, config, scratch), {**kept, SCORE: score[None].clone()})


def _link(folder: Path, scratch: Path) -> Path:
    """Link the source folder's files without config.json into a folder in `scratch`; return it."""
    files = scratch / "classifier"
    files.mkdir()
    for file in (f for f in folder.iterdir() if f.is_file() and f.name != CONFIG):
        (files / file.name).symlink_to(file.resolve())
    return files


def _files(folder: Path, config: Any, scratch: Path) -> Path:
    """Return a folder of a loaded ranking model's files with the classifier's config.json."""
    files = _link(folder, scratch)
    document = read_json(folder / CONFIG) | {
        "architectures": config.architectures,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        "pad_token_id": config.pad_token_id,
    }
    document.pop("num_labels", None)
    (files / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return files


def verify(section: Model, folder: Path, pairing: SourceWeights, out: Path) -> None:
    """Raise OptimizeError naming the first written parameter that differs from the source, the
    classifier's weight left out: score_comparison.py compares its scores."""
    names = {p: n for p, n in pairing.source_names.items() if n != SCORE}
    rest = SourceWeights({n: pairing.stored[n] for n in names.values()}, names, pairing.unused)
    with make_temporary_folder("load") as scratch:
        checkpoint, files = open_checkpoint(out), _link(folder, scratch)
        (files / CONFIG).symlink_to((checkpoint.folder / CONFIG).resolve())  # as `read` made it
        faithful.check(files, section, checkpoint.tensors.as_written, rest, computed={SCORE})


LOGIT_SCORE = Provider("logit-score", logit_score.takes, read, verify)
