"""Read config.json, and refuse architectures that no later stage can handle."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import source, weights
from optimizer.load.adapters import adapter
from optimizer.load.config import config_fields, model_type
from optimizer.load.config.model_folder import model_folder
from optimizer.load.input_kinds import preparation
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.providers import gguf, pairs, timm
from optimizer.load.sentence import logit_score
from optimizer.model.architectures import families
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model

UNCOVERED = {
    "siglip2": (
        "its images are lists of patches of any number",
        "Use a checkpoint of SigLIP 2 with a fixed size of image, whose model_type is siglip.",
    ),
}
"""{model_type: (reason, advice)} of architectures that would fail later with a worse message."""


def peek_config(section: Model, *, fetch: bool) -> tuple[Path, dict[str, Any]] | None:
    """Return (path, content) of config.json, before anything is loaded; None for a GGUF or ONNX
    file, which has none, and without `fetch` for a model that only the hub has. Raises
    CheckpointError."""
    if (
        section.gguf_file is not None
        or onnx_files.takes(section)
        or not (fetch or source.is_local(section.source, section.base))
    ):
        return None
    root = source.peek(section).folder
    with reading(root):
        file = model_folder(root) / "config.json"
        return file, model_type.complete(read_json(file), section.model_type)


def refuse_uncovered(raw: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for an architecture of UNCOVERED. raw: content of config.json."""
    backbone = raw.get("backbone_config")
    experts = backbone.get("num_experts", 1) if isinstance(backbone, dict) else 1
    uncovered = UNCOVERED.get(str(raw.get("model_type")))
    if raw.get("model_type") == "vitpose" and experts != 1:
        uncovered = (
            f"it has {experts} experts, of which each request names one (dataset_index)",
            "Use a VitPose without experts (num_experts: 1), such as vitpose-base-simple.",
        )
    if uncovered:
        raise CheckpointError(
            f"architecture {raw['model_type']!r} is not covered: {uncovered[0]}",
            where=f"{file}: model_type",
            accepted=", ".join(sorted(families.FAMILIES)),
            fix=uncovered[1],
        )


def read_config(folder: Path, section: Model) -> Any:
    """Read the transformers config of the checkpoint in `folder`. Raises CheckpointError for an
    unusable model."""
    from transformers import AutoConfig

    if section.gguf_file is not None:
        return gguf.config(folder, section)
    file = folder / "config.json"
    raw = model_type.complete(read_json(file), section.model_type)
    if timm.is_timm(raw):
        return timm.config(folder, raw)
    if not raw.get("auto_map"):  # a model's own code defines its fields itself
        config_fields.check(raw, file)
        config_fields.check_activations(raw, file)
        config_fields.check_sizes(raw, folder, file)
    if raw.get("auto_map") and not section.trust_remote_code:
        raise CheckpointError(
            f"the model needs its own code (auto_map: {', '.join(map(str, raw['auto_map']))}), "
            "which would run on this machine",
            where=str(file),
            fix="Read that code, then set model.trust_remote_code: true; or remove auto_map to "
            "use the class that transformers has.",
        )
    elsewhere = [str(v) for v in (raw.get("auto_map") or {}).values() if "--" in str(v)]
    if elsewhere:
        raise CheckpointError(
            f"the model's code is in another repository ({elsewhere[0]}), which no revision pins",
            where=f"{file}: auto_map",
            fix="Copy that code next to config.json and name it without the repository.",
        )
    if not raw.get("model_type"):
        kinds = model_type.list_candidates(raw, weights.read_headers(folder))
        fits = f", which the weights are named for: {' or '.join(kinds)}" if kinds else ""
        raise CheckpointError(
            "model_type is missing, so the architecture is not known",
            where=str(file),
            accepted=", ".join(sorted(families.FAMILIES)),
            fix=f"Set model.model_type in the recipe{fits}.",
        )
    refuse_uncovered(raw, file)
    if pairs.is_pair(raw):
        return pairs.config(section, folder)
    pairs.check_side(raw, section, file)
    fix = "Check model_type, or install the transformers version the model asks for."
    with reading(file, fix=fix), make_temporary_folder("config") as scratch:
        files = model_type.complete_config(folder, section.model_type, scratch)
        config = AutoConfig.from_pretrained(files, trust_remote_code=section.trust_remote_code)
    config.name_or_path = str(folder)
    if hasattr(config, "quantization_config"):  # integers are read by load, not by transformers
        del config.quantization_config
    adapter.set_labels(config, section, folder)
    if logit_score.takes(section, folder):
        logit_score.set_head(config, folder, section)
    return config


def read_complete_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a checkpoint with transformers' defaults for missing fields."""
    from transformers import AutoConfig

    document: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    return document


def check_task(config: Any, section: Model, folder: Path) -> None:
    """Raise CheckpointError if the architecture does not suit the task: an encoder or bidirectional
    decoder for text generation, a causal decoder where both sides of a token are read, a language
    model's head for text-ranking, a model of more than texts for a task of texts, or an
    encoder-decoder without a row (except T5's encoder, for hidden states)."""
    task, causal = tasks.find_task(section.task), families.is_causal(config)
    what, fix = "", ""
    if getattr(config, "is_encoder_decoder", False):
        alone = task.headless and families.has_encoder(config.model_type)
        what = "" if alone or config.model_type in families.FAMILIES else "an encoder-decoder"
        fix = "Use an encoder, or for hidden states and embeddings the encoder of a T5."
        if what and task.inputs.name == IMAGE.name:
            what, fix = _describe_detector(config)
    elif task.inputs.name != IMAGE.name and config.get_text_config() is not config:
        what = "a model of texts and more, such as images, of which the text_config is one part"
        fix = "Use a checkpoint that holds the model of texts alone."
    elif causal and task.ranks and _predicts_tokens(config, section, folder):
        what, fix = (
            f"a decoder with a head over the vocabulary ({config.architectures[0]}) in a GGUF "
            "file, and rankings read its logits of yes and no from a folder of float weights",
            "Set model.source to the folder that the file was made from; or set model.task: "
            "text-generation, and read the logprobs of yes and no from /v1/completions.",
        )
    elif causal and task.extracts:
        what, fix = (
            "a causal decoder; question answering is supported for encoders",
            "Bring an encoder with a head for question answering.",
        )
    elif causal and task.reads_vocabulary:
        what, fix = (
            "a decoder: each position sees only those before it, so none sees both sides of a "
            "token",
            "Set model.task: text-generation for a causal language model.",
        )
    elif task.generates and families.sees_both_sides(config):
        what, fix = (
            "a decoder whose config turns attention bidirectional, so it cannot generate",
            "Set model.task: sentence-embedding, or the task it was trained for.",
        )
    elif task.generates and not causal:
        what, fix = (
            "an encoder, or not a causal language model of transformers",
            "Set model.task to the task it was trained for, e.g. sentence-embedding.",
        )
    if what:
        raise _not_covered(config, section, folder, what, fix)


def _describe_detector(config: Any) -> tuple[str, str]:
    """Return (description, remedy) of an encoder-decoder of images without a row.

    RT-DETR, D-FINE and the variants of others in two stages choose as queries the places of an
    image that have the highest scores of one module."""
    learned = "Use a detector with learned queries that is listed: DETR, Table Transformer or YOLOS"
    queries = getattr(config, "num_queries", "best")
    if hasattr(config, "learn_initial_query"):
        scores = "model.enc_score_head"
    elif getattr(config, "two_stage", False):
        scores = "the first stage"
    else:
        return "an encoder-decoder that is not listed", f"{learned}."
    return (
        f"a detector whose queries are the {queries} places with the highest scores of {scores}: "
        "rounding exchanges them, so no distance of outputs could judge it",
        f"{learned}; or export it to ONNX, and compress what is in front of the TopK: task: "
        "tensors, with the feature maps that the decoder reads as model.outputs; its decoder then "
        "runs in float (docs/vision.md).",
    )


def _predicts_tokens(config: Any, section: Model, folder: Path) -> bool:
    """Return True for a class with a head over the vocabulary, where no adapter brings another
    head."""
    named = str((getattr(config, "architectures", None) or [""])[0])
    return named.endswith(logit_score.LANGUAGE_MODEL) and not adapter.find(section, folder)


def check_covered(config: Any, section: Model, model: nn.Module, folder: Path) -> None:
    """Raise CheckpointError where the model's first argument is not the task's (e.g. input_ids)."""
    takes = preparation(tasks.find_task(section.task))
    if next(iter(inspect.signature(model.forward).parameters)) != takes.first:
        what = f"of another kind than {takes.noun}s: its first input is not {takes.first}"
        raise _not_covered(config, section, folder, what)


def _not_covered(
    config: Any, section: Model, folder: Path, what: str, fix: str = ""
) -> CheckpointError:
    """Build the error for an architecture that the task does not accept; it lists accepted ones."""
    task = tasks.find_task(section.task)
    kinds = ["decoder"] if task.generates else ["encoder"]
    noun = preparation(task).noun.replace("model", kinds[0])
    if not task.generates and not task.reads_vocabulary:
        kinds, noun = [*kinds, "decoder"], preparation(task).noun
    rows = sorted(
        n for n, f in families.FAMILIES.items() if f.kind in kinds and f.inputs == task.inputs.name
    )
    return CheckpointError(
        f"architecture {config.model_type!r} is not covered for task {section.task}: it is {what}",
        where=f"{folder / 'config.json'}: model_type",
        accepted=f"{noun}s: {', '.join(rows)}, and others built as one list of equal blocks",
        fix=fix,
    )
