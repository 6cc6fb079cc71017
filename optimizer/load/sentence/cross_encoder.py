"""Read the settings that sentence-transformers' CrossEncoder saves beside a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError
from optimizer.load.config.modules_json import read_modules
from optimizer.model.checkpoint.checkpoint import read_json

SETTINGS = "config_sentence_transformers.json"
OLDEST = "sbert_ce_default_activation_function"
IDENTITY, SIGMOID = "identity", "sigmoid"
ONE_LABEL = {"Identity": IDENTITY, "Sigmoid": SIGMOID}  # torch's name: the contract's
SEVERAL_LABELS = ("Identity", "Softmax")  # of which transformers' pipeline makes a softmax too


def read_settings(root: Path) -> dict[str, Any] | None:
    """The content of config_sentence_transformers.json if CrossEncoder wrote it, else None."""
    file = root / SETTINGS
    document = read_json(file) if file.is_file() else {}
    return document if document.get("model_type") == "CrossEncoder" else None


def scores_pairs(root: Path, raw: Mapping[str, Any]) -> bool:
    """Return True for a folder that CrossEncoder wrote for a model with one label. raw:
    config.json."""
    labels = len(raw.get("id2label") or ()) or raw.get("num_labels", 2)
    return labels == 1 and (read_settings(root) is not None or _in_config(raw) is not None)


def read_prompt(root: Path) -> str:
    """The prompt that a CrossEncoder adds to every pair by default; "" without one."""
    document = read_settings(root) or {}
    name = document.get("default_prompt_name")
    return "" if name is None else str((document.get("prompts") or {}).get(name) or "")


def check(root: Path, *, templated: bool, scored: bool) -> None:
    """Raise CheckpointError for parts of a CrossEncoder that the harness does not have: modules
    other than the transformer, and a prompt that is added to every text.

    templated: True if the prompt is a part of the contract's template
    scored: True if the head is that of a causal language model, which LogitScore reads
    """
    if read_settings(root) is None:
        return
    modules = read_modules(root) if (root / "modules.json").is_file() else []
    kinds = [str(m.get("type", "")).rpartition(".")[2] for m in modules]
    accepted = ("Transformer", "LogitScore") if scored else ("Transformer",)
    if others := [kind for kind in kinds if kind not in accepted]:
        raise CheckpointError(
            f"the CrossEncoder has the module {others[0]}, which is not covered",
            where=str(root / "modules.json"),
            accepted="one Transformer, with a sequence classifier of one label as its head",
        )
    if read_prompt(root) and not templated:
        name = (read_settings(root) or {})["default_prompt_name"]
        raise CheckpointError(
            f"the CrossEncoder adds the prompt {name!r} to every query, and none is added here",
            where=f"{root / SETTINGS}: default_prompt_name",
            accepted="null",
            fix="Set it to null, and add the prompt to the queries in the data and the requests.",
        )


def read_activation(root: Path, config: Any, *, ranks: bool = False) -> str | None:
    """Read from a source folder the contract's activation of a model with one label; None for
    several labels.

    root: folder of config_sentence_transformers.json
    config: transformers' config
    ranks: True for a task whose answers are CrossEncoder's; without it, a folder that does not name
        an activation answers as transformers' pipeline, which leaves a regression's logit as it is

    Raises CheckpointError for an activation that the harness does not have.
    """
    one = len(config.id2label) == 1
    if not one and getattr(config, "problem_type", None) == "multi_label_classification":
        return None
    saved = _saved(root, config)
    if saved is None:
        regression = getattr(config, "problem_type", None) == "regression" and not ranks
        return (IDENTITY if regression else SIGMOID) if one else None
    path, where = saved
    name = path.rpartition(".")[2] if path.startswith("torch.") else path
    accepted = tuple(ONE_LABEL) if one else SEVERAL_LABELS
    if name not in accepted:
        raise CheckpointError(
            f"activation {path!r} is not covered for a model with "
            f"{'one label' if one else f'{len(config.id2label)} labels'}",
            where=where,
            accepted=", ".join(f"torch.nn.{n}" for n in accepted),
            fix="Save the CrossEncoder with activation_fn Identity, and apply this activation to "
            "the scores that the bundle answers.",
        )
    return ONE_LABEL[name] if one else None


def _saved(root: Path, config: Any) -> tuple[str, str] | None:
    """Return (dotted name of the activation that a source folder saves, its place), where
    CrossEncoder looks for it; else None."""
    document = read_settings(root)
    if document and document.get("activation_fn") is not None:
        return str(document["activation_fn"]), f"{root / SETTINGS}: activation_fn"
    return _in_config(vars(config))


def _in_config(config: Mapping[str, Any]) -> tuple[str, str] | None:
    """Read the settings of a CrossEncoder from config.json, where versions before 5 of the library
    wrote them."""
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict) and nested.get("activation_fn") is not None:
        return str(nested["activation_fn"]), "config.json: sentence_transformers.activation_fn"
    oldest = config.get(OLDEST)
    return None if oldest is None else (str(oldest), f"config.json: {OLDEST}")
