"""Reading config.json, and refusing what no later stage could handle."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.load import source
from optimizer.load.config import config_fields
from optimizer.load.config.modules_json import module_folder, read_modules
from optimizer.load.input_kinds import preparation
from optimizer.load.providers import gguf, timm
from optimizer.model.architectures import families
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Model

_CLIP = (
    "its vectors of images and texts are the outputs of projections, and no task here reads those",
    "Use DINOv2 or ViT for vectors of images, and a sentence encoder for those of texts.",
)
UNCOVERED = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
}
"""{model_type: (what it is, what to do)} of architectures that would fail later, less plainly."""


def model_folder(root: Path) -> Path:
    """Where config.json of the transformer is: `root`, or for a sentence-transformers model the
    folder that modules.json says."""
    if (root / "modules.json").is_file():
        for module in read_modules(root):
            if str(module.get("type", "")).endswith(".Transformer") and module.get("path"):
                return module_folder(root, module)
    return root


def at_hand(section: Model, *, fetch: bool) -> tuple[Path, dict[str, Any]] | None:
    """config.json and what it says, before anything is loaded; None of a GGUF file, which has
    none, and of what only a hub has, unless `fetch`. Raises CheckpointError where it cannot be
    read."""
    if section.gguf_file is not None or not (fetch or source.is_local(section.source)):
        return None
    root = source.peek(section).folder
    with reading(root):
        file = model_folder(root) / "config.json"
        return file, read_json(file)


def refuse_uncovered(raw: Mapping[str, Any], file: Path) -> None:
    """Raise CheckpointError for an architecture of UNCOVERED, without reading more than `raw`, the
    content of config.json."""
    if uncovered := UNCOVERED.get(str(raw.get("model_type"))):
        raise CheckpointError(
            f"architecture {raw['model_type']!r} is not covered: {uncovered[0]}",
            where=f"{file}: model_type",
            accepted=", ".join(sorted(families.FAMILIES)),
            fix=uncovered[1],
        )


def read_config(folder: Path, section: Model) -> Any:
    """The transformers config. Raises CheckpointError for what we do not load."""
    from transformers import AutoConfig

    if section.gguf_file is not None:
        return gguf.config(folder, section)
    file = folder / "config.json"
    raw = read_json(file)
    if timm.is_timm(raw):
        return timm.config(folder, raw)
    if not raw.get("auto_map"):  # what the fields of a model's own code mean is for it to say
        config_fields.check(raw, file)
        config_fields.check_activations(raw, file)
        config_fields.check_sizes(raw, folder, file)
    if raw.get("auto_map") and not section.trust_remote_code:
        raise CheckpointError(
            f"the model brings its own code (auto_map: {', '.join(map(str, raw['auto_map']))}), "
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
            fix="Copy that code beside config.json and name it without the repository.",
        )
    if not raw.get("model_type"):
        raise CheckpointError(
            "no model_type, so the architecture is not known",
            where=str(file),
            accepted=", ".join(sorted(families.FAMILIES)),
            fix='Add it, e.g. "model_type": "bert".',
        )
    refuse_uncovered(raw, file)
    fix = "Check model_type, or install the transformers version the model asks for."
    with reading(file, fix=fix):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    if hasattr(config, "quantization_config"):  # the codes are read here, not by transformers
        del config.quantization_config
    return config


def complete(folder: Path) -> dict[str, Any]:
    """config.json of a folder, with transformers' defaults for what it leaves out."""
    from transformers import AutoConfig

    document: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    return document


def check_task(config: Any, section: Model, folder: Path) -> None:
    """Refuse an architecture that is not of the task's kind: its contract could not say what goes
    in and out. Raises CheckpointError naming what it is."""
    generates, causal = tasks.task(section.task).generates, families.is_causal(config)
    what, fix = "", ""
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder-decoder"
    elif causal and not generates:
        what, fix = (
            "a decoder: each position sees only those before it",
            "Set model.task: text-generation for a causal language model.",
        )
    elif generates and not causal:
        what, fix = (
            "an encoder, or no causal language model that transformers has",
            "Set model.task to what it was trained for, e.g. sentence-embedding.",
        )
    if what:
        raise _not_covered(config, section, folder, what, fix)


def check_covered(config: Any, section: Model, model: nn.Module, folder: Path) -> None:
    """Refuse what takes inputs of another kind than the task's."""
    takes = preparation(tasks.task(section.task))
    if next(iter(inspect.signature(model.forward).parameters)) != takes.first:
        what = f"no {takes.noun}: its first input is not {takes.first}"
        raise _not_covered(config, section, folder, what)


def _not_covered(
    config: Any, section: Model, folder: Path, what: str, fix: str = ""
) -> CheckpointError:
    task = tasks.task(section.task)
    kind = "decoder" if task.generates else "encoder"
    known = families.FAMILIES.items()
    rows = sorted(n for n, f in known if f.kind == kind and f.inputs == task.inputs.name)
    noun = preparation(task).noun.replace("model", kind)
    return CheckpointError(
        f"architecture {config.model_type!r} is not covered for task {section.task}: it is {what}",
        where=f"{folder / 'config.json'}: model_type",
        accepted=f"{noun}s: {', '.join(rows)}, and others that are one list of equal blocks",
        fix=fix,
    )
