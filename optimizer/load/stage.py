"""load: find the model, check all of it, and write it the way every later stage reads it.

out/checkpoint/     config.json, model.safetensors with the model's own parameter names,
                    tokenizer.json without truncation or padding, tokenizer_config.json
out/source.json     where it came from, and the digest of every file it was made of
out/contract.json   what goes in and what comes out
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from optimizer import safetensors_stream
from optimizer.errors import CheckpointError
from optimizer.load import families, source, tokenizer, weights
from optimizer.load.checkpoint import read_json
from optimizer.load.contract import contract, read_modules
from optimizer.load.model import parameter_shapes, skeleton_from_config
from optimizer.recipe import Model
from optimizer.store import Stage, digest_file

VERSION = 1
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def run(section: Model, out: Path) -> None:
    """Write the three. Raises CheckpointError, MachineError or RecipeError."""
    found = source.resolve(section)
    read = source.files(found)
    folder = _model_folder(found.folder)
    config = _config(folder, section)
    model = skeleton_from_config(config, section.task, section.trust_remote_code)
    _check_covered(config, model, folder)
    family = families.family(config)
    chosen = weights.match(weights.find(folder, section), model, section)

    checkpoint = out / "checkpoint"
    checkpoint.mkdir()
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    fast = tokenizer.convert(folder, checkpoint, rows, section.trust_remote_code)
    copied = [folder / n for n in ("config.json", *SETTINGS) if (folder / n).is_file()]
    copied += sorted(folder.glob("*.py")) if section.trust_remote_code else []
    for file in copied:
        shutil.copyfile(file, checkpoint / file.name)
    document = contract(section, config, model, family, fast, folder, found.folder)
    safetensors_stream.write(chosen.entries(), checkpoint / "model.safetensors")
    _write(out / "contract.json", document)
    made_of = {
        str(f.relative_to(found.folder)): {"sha256": digest_file(f), "size": f.stat().st_size}
        for f in read
    }
    _write(
        out / "source.json",
        {
            "source": section.source,
            "revision": found.revision,
            "files": made_of,
            "licence": _licence(folder, found.folder),
            "model_type": config.model_type,
            "architecture": type(model).__name__,
            "task": section.task,
            "parameters": sum(prod(s) for s in parameter_shapes(model).values()),
            "unused": list(chosen.unused),
        },
    )


def _write(file: Path, document: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _model_folder(root: Path) -> Path:
    """Where config.json of the transformer is: `root`, or for a sentence-transformers model the
    folder that modules.json says."""
    if (root / "modules.json").is_file():
        for module in read_modules(root):
            if str(module.get("type", "")).endswith(".Transformer") and module.get("path"):
                folder = (root / str(module["path"])).resolve()
                if not folder.is_relative_to(root):
                    raise CheckpointError(
                        f"path {module['path']!r} leaves the folder",
                        where=str(root / "modules.json"),
                    )
                return folder
    return root


def _config(folder: Path, section: Model) -> Any:
    """The transformers config. Raises CheckpointError for what we do not load."""
    from transformers import AutoConfig

    file = folder / "config.json"
    raw = read_json(file)
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
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise CheckpointError(
            f"the checkpoint is already quantized ({method})",
            where=f"{file}: quantization_config",
            fix="Use the float checkpoint it was made from.",
        )
    if not raw.get("model_type"):
        raise CheckpointError(
            "no model_type, so the architecture is not known",
            where=str(file),
            accepted=", ".join(sorted(families.FAMILIES)),
            fix='Add it, e.g. "model_type": "bert".',
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    except (ValueError, TypeError, KeyError) as e:
        raise CheckpointError(
            f"transformers does not read it ({' '.join(str(e).split())[:200]})",
            where=str(file),
            fix="Check model_type, or install the transformers version the model asks for.",
        ) from e
    return config


def _check_covered(config: Any, model: nn.Module, folder: Path) -> None:
    """Refuse what is no text encoder: its contract could not say what goes in and out."""
    from transformers.models.auto import modeling_auto as auto

    kind = config.model_type
    causal = (
        kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        and kind not in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )
    what = ""
    if getattr(config, "is_encoder_decoder", False):
        what = "an encoder-decoder"
    elif causal or getattr(config, "is_decoder", False):
        what = "a decoder: each position sees only those before it"
    elif next(iter(inspect.signature(model.forward).parameters)) != "input_ids":
        what = "no text model: its first input is not input_ids"
    if what:
        raise CheckpointError(
            f"architecture {kind!r} is not covered: it is {what}",
            where=f"{folder / 'config.json'}: model_type",
            accepted=f"text encoders: {', '.join(sorted(families.FAMILIES))}, and others that are "
            "one list of equal blocks",
        )


def _licence(folder: Path, root: Path) -> str:
    """The licence named in the front matter of README.md, or ""."""
    for file in (folder / "README.md", root / "README.md"):
        if file.is_file():
            found = re.match(
                r"---\n.*?^licen[sc]e:\s*([^\n]+?)\s*$.*?^---", file.read_text(), re.M | re.S
            )
            if found:
                return found[1].strip("\"'")
    return ""


STAGE = Stage(
    name="load",
    version=VERSION,
    run=run,
    packages=("transformers", "tokenizers"),
    files=source.digests,
)
