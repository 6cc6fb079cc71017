"""load: find the model, check all of it, and write it the way every later stage reads it.

out/checkpoint/     config.json, model.safetensors with the model's own parameter names,
                    tokenizer.json without truncation or padding, tokenizer_config.json
out/source.json     where it came from, and the digest of every file it was made of
out/contract.json   what goes in and what comes out
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from optimizer import safetensors_stream
from optimizer.load import faithful, families, source, tokenizer, weights
from optimizer.load.checkpoint import open_checkpoint
from optimizer.load.config import check_covered, model_folder, read_config
from optimizer.load.contract import contract
from optimizer.load.model import parameter_shapes, skeleton_from_config
from optimizer.progress import say
from optimizer.recipe import Model
from optimizer.store import Estimate, Shapes, Stage, digest_file

VERSION = 2
IMPORTS = 450_000_000  # resident after importing torch and transformers; measured
BYTES_PER_SECOND = 60_000_000  # hashed twice, checked and written twice; measured on one core
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")


def run(section: Model, out: Path) -> None:
    """Write the three. Raises CheckpointError, MachineError or RecipeError."""
    found = source.resolve(section)
    read = source.files(found)
    folder = model_folder(found.folder)
    config = read_config(folder, section)
    model = skeleton_from_config(config, section.task, section.trust_remote_code)
    check_covered(config, model, folder)
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
    for pattern in source.LICENCES:
        for file in sorted(folder.glob(pattern)):
            shutil.copyfile(file, checkpoint / file.name)
    document = contract(section, config, model, family, fast, folder, found.folder)
    if chosen.unused:
        some = ", ".join(chosen.unused[:4]) + (", …" if len(chosen.unused) > 4 else "")
        say(f"load: {len(chosen.unused)} tensors have no use for {section.task}: {some}")
    safetensors_stream.write(chosen.entries(), checkpoint / "model.safetensors")
    faithful.check(folder, section, open_checkpoint(out).tensors)
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


def estimate(section: Model, shapes: Shapes) -> Estimate:
    """Tensors pass through one by one: memory is that of the imports and of the largest tensor
    (as stored, as checked, as written); disk is that of float32 weights, an upper bound."""
    del section
    sizes = [4 * prod(shape) for shape in shapes.values()]
    return Estimate(
        memory=IMPORTS + 3 * max(sizes, default=0),
        disk=sum(sizes),
        seconds=5 + sum(sizes) / BYTES_PER_SECOND,
    )


STAGE = Stage(
    name="load",
    version=VERSION,
    run=run,
    packages=("transformers", "tokenizers"),
    files=source.digests,
    estimate=estimate,
)
