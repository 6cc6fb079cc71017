"""Stage load: find the model, check it, and write it in the layout that every later stage reads.

out/checkpoint/     config.json; model.safetensors with transformers' parameter names, or the
                    source's own shards (linked.py);
                    tokenizer.json without truncation or padding and tokenizer_config.json, or
                    preprocessor_config.json for an image model; for a decoder also
                    generation_config.json and chat_template.jinja, if the source has them
out/source.json     the source, its revision, and the digest of every file read
out/contract.json   inputs and outputs
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import nn

from optimizer.foundation import reading, safetensors_stream
from optimizer.foundation.process import machine_speed
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.load import (
    conversions,
    faithful,
    headers,
    linked,
    outside_task,
    source,
    weights,
)
from optimizer.load.adapters import adapter, hot
from optimizer.load.adapters.merge import leave_out, merge
from optimizer.load.config import image_processor
from optimizer.load.config.config import (
    check_covered,
    check_task,
    peek_config,
    read_config,
)
from optimizer.load.config.model_folder import model_folder
from optimizer.load.contract import build_contract
from optimizer.load.input_kinds import preparation
from optimizer.load.onnx_model import files as onnx_files
from optimizer.load.onnx_model import stage as onnx_model
from optimizer.load.preparation import Described
from optimizer.load.providers import pair_comparison, provider
from optimizer.load.sentence import library, logit_score, score_comparison, vector_comparison
from optimizer.load.torch_module import stage as torch_module
from optimizer.model.architectures import architecture
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.checkpoint import read_header
from optimizer.model.checkpoint.model import build_skeleton_from_config, list_parameter_shapes
from optimizer.recipe.schema import Model
from optimizer.store import Estimate, Shapes, Stage

VERSION = 4
FRONT_MATTER = 65_536  # characters of README.md that are searched for a licence
IMPORTS = 450_000_000  # bytes resident after importing torch and transformers; measured
START = 15e6  # turns of MachineSpeed.interpreted for the tokenizer and the skeleton; measured
LIBRARY = 48e6  # turns for the import and the answers of sentence-transformers; measured
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    *image_processor.FILES,
)


def run(section: Model, out: Path) -> None:
    """Load the recipe's checkpoint and write it in one layout. Raises CheckpointError, MachineError
    or RecipeError."""
    if torch_module.takes(section):
        torch_module.run(section, out)
        return
    if onnx_files.takes(section):
        onnx_model.run(section, out)
        return
    resolved = source.resolve(section)
    with own_code.contain(resolved.folder), reading.reading(resolved.folder, own_faults=True):
        origin = _origin(section, resolved)
        folder = model_folder(resolved.folder)
        adapters = adapter.find(section, folder)
        if not adapters and not (folder / adapter.CONFIG).is_file():
            _write_folder(section, resolved, origin, out)
            return
        with make_temporary_folder("merged") as scratch:
            if adapters:
                trained = section
                if logit_score.takes(section, folder):  # its head is read after merging
                    trained = section.model_copy(update={"task": tasks.list_generating()[0]})
                config, model, _ = open_skeleton(trained, folder)
                _check_base(trained, folder, model, adapters)
                merged = merge(trained, resolved, folder, adapters, config, scratch)
                section = section.model_copy(update={"ignore_tensors": ()})
            else:
                merged = leave_out(resolved, scratch)
            left = section if section.hot else section.model_copy(update={"adapters": ()})
            _write_folder(left, merged, origin, out)


def _check_base(
    section: Model, folder: Path, model: nn.Module, adapters: Sequence[adapter.Adapter]
) -> None:
    """Check the weights that adapters are merged into as those of a model without adapters, because
    the merged folder has every tensor in its place. Raises CheckpointError."""
    stored = adapter.replace_tensors(weights.find(folder, section), adapters)
    weights.check_unused(weights.match(stored, model, section), model, section)


def _write_folder(
    section: Model, resolved: source.Source, origin_of: dict[str, Any], out: Path
) -> None:
    """Write the folder of a loaded checkpoint. origin_of: content of source.json so far."""
    folder = model_folder(resolved.folder)
    config, model, family = open_skeleton(section, folder)
    origin = provider(section, folder)
    _say_incomplete(section)

    checkpoint = out / "checkpoint"
    checkpoint.mkdir()
    with make_temporary_folder("load") as scratch:
        loaded = origin.read(section, folder, config, scratch)
        files, stored = loaded.files, loaded.weights
        pairing = weights.match(stored, model, section)
        described = Described(section, config, model, family, files, resolved.folder)
        document = write_inputs(described, checkpoint)
        weights.check_unused(pairing, model, section)
        copied = [files / n for n in ("config.json", *SETTINGS) if (files / n).is_file()]
        copied += sorted(folder.glob("*.py")) if section.trust_remote_code else []
        for file in copied:
            shutil.copyfile(file, checkpoint / file.name)
    for pattern in source.LICENCES:
        for file in (f for f in sorted(folder.glob(pattern)) if f.is_file()):
            shutil.copyfile(file, checkpoint / file.name)
    if pairing.unused:
        some = ", ".join(pairing.unused[:4]) + (", …" if len(pairing.unused) > 4 else "")
        say(f"load: {section.task} does not use {len(pairing.unused)} tensors: {some}")
    if not linked.link(pairing, checkpoint):
        file = checkpoint / "model.safetensors"
        safetensors_stream.write_known(pairing.specs(), pairing.read, file)
    origin.verify(section, folder, pairing, out)
    write_json(out / "contract.json", document)
    vector_comparison.compare(described, out)
    score_comparison.compare(described, out)
    pair_comparison.compare(described, out)
    origin_of |= {
        "licence": _licence(folder, resolved.folder) or loaded.licence,
        "model_type": config.model_type,
        "architecture": type(model).__name__,
        "parameters": sum(prod(s) for s in list_parameter_shapes(model).values()),
        "unused": list(pairing.unused),
    }
    write_json(out / "source.json", origin_of)
    hot.write(section, out)


def open_skeleton(section: Model, folder: Path) -> tuple[Any, nn.Module, Family]:
    """Return (transformers config, model without weights, facts about its architecture). Raises
    CheckpointError for a model that the task or this toolchain does not cover."""
    config = read_config(folder, section)
    check_task(config, section, folder)
    model = build_skeleton_from_config(config, section.task, section.trust_remote_code)
    check_covered(config, section, model, folder)
    code = folder if section.trust_remote_code else None
    return config, model, architecture.find_family(config, section.task, code)


def write_inputs(described: Described, checkpoint: Path) -> dict[str, Any]:
    """Write the tokenizer's file, if any, to `checkpoint`; return the document of contract.json."""
    kind = preparation(described.task)
    document = build_contract(described, kind, kind.convert(described, checkpoint))
    tasks.check(Contract.from_json(document))
    return document


def origin(section: Model) -> dict[str, Any]:
    """Return for source.json {"source", "revision", "files": {path: {sha256, size}}} of a recipe's
    model, which is fetched where it is on a hub."""
    if torch_module.takes(section):
        return torch_module.origin(section)
    if onnx_files.takes(section):
        return onnx_files.origin(section)
    resolved = source.resolve(section)
    return {
        "source": section.source,
        "revision": resolved.revision,
        "files": adapter.describe_files(section, resolved),
    }


def _origin(section: Model, resolved: source.Source) -> dict[str, Any]:
    """Return {"source", "revision", "files": {path: {sha256, size}} of all files, "task"}; with
    model.adapters also their names."""
    origin = {
        "source": section.source,
        "revision": resolved.revision,
        "files": adapter.describe_files(section, resolved),
        "task": section.task,
    }
    return origin | ({"adapters": list(names)} if (names := section.adapter_sources) else {})


def _say_incomplete(section: Model) -> None:
    if section.source.startswith(source.PACKAGE):
        name = section.source.removeprefix(source.PACKAGE)
        if absent := source.list_missing(name):
            say(
                f"load: {name} is installed without its dependencies {', '.join(absent)}, which is "
                "enough: only its files are read"
            )


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON file of the load stage's folder, indented."""
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _licence(folder: Path, root: Path) -> str:
    """Read the licence of a source from the front matter of folder/README.md, else of
    root/README.md; "" without."""
    for file in (folder / "README.md", root / "README.md"):
        if file.is_file():
            with file.open(encoding="utf-8", errors="replace") as f:
                front = f.read(FRONT_MATTER)
            match = re.match(r"---\n.*?^licen[sc]e:\s*([^\n]+?)\s*$.*?^---", front, re.M | re.S)
            if match:
                return match[1].strip("\"'")
    return ""


def files(section: Model) -> dict[str, str]:
    """Return {file: digest} for the load stage's key: of the source, and of the module of another
    package's task."""
    if torch_module.takes(section):
        return torch_module.digests(section)
    if onnx_files.takes(section):
        return onnx_files.digests(section)
    return {
        **source.digest_source(section),
        **adapter.digest_files(section),
        **outside_task.digest_files(section.task),
    }


def estimate(section: Model, shapes: Shapes) -> Estimate:
    """Estimate stage load. Disk: the weights as stored, or the other files where they can be
    linked; for a model on the hub the upper bound of float32.

    Memory: imports, plus the model in float32 and its largest tensor again, twice the model where
    it is compared with its library; beyond faithful.IN_MEMORY only the largest tensor as stored. A
    GGUF file takes a second copy, because it is de-quantized at once.
    """
    if torch_module.takes(section):
        return torch_module.estimate(shapes, IMPORTS)
    if onnx_files.takes(section):
        return onnx_model.estimate(shapes, IMPORTS)
    values = {name: prod(shape) for name, shape in shapes.items()}
    total, largest = sum(values.values()), max(values.values(), default=0)
    width = _bytes_per_value(section)
    memory, speed = 4 * (total + largest), machine_speed.measure()
    stored = width * total  # digested twice; read, checked and written
    seconds = speed.interpret(START) + speed.digest(2 * stored) + speed.move(4 * stored)
    if section.gguf_file is not None:
        memory, seconds = memory + 4 * total, seconds + 30
    elif 4 * total > faithful.IN_MEMORY and not section.adapter_sources:
        memory = math.ceil(width * largest)
    peeked = peek_config(section, fetch=False)
    if peeked is not None and conversions.converts(str(peeked[1].get("model_type"))):
        memory = max(memory, 8 * total)  # transformers' model, and the one that it is compared with
    if tasks.find_task(section.task).ranks and library.fits(total):
        memory, seconds = (
            max(memory, library.BYTES * total),
            seconds + 10 + library.predict_seconds(total),
        )
    if tasks.find_task(section.task).names_labels:  # both sides, and one in float64
        memory, seconds = max(memory, 5 * 4 * total), seconds + 20
    if vector_comparison.is_compared(section) and library.fits(total):
        memory = max(memory, library.BYTES * total) + vector_comparison.IMPORTS
        seconds += speed.interpret(LIBRARY) + library.predict_seconds(total)
    others = None if section.merged else _beside_linked(section)
    disk = math.ceil(width * total) if others is None else others
    if section.merged:  # merged in float32, and written once beside the step
        disk = 2 * 4 * total
    return Estimate(memory=IMPORTS + memory, disk=disk, seconds=seconds)


def _beside_linked(section: Model) -> int | None:
    """Return the bytes of a local checkpoint's files beside weights that can be linked (linked.py);
    None for other weights."""
    if section.gguf_file is not None or not source.is_local(section.source):
        return None
    folder = model_folder(source.resolve(section).folder)
    files = [*folder.glob("*.safetensors")]
    if not files or not all(map(linked.never_written, files)):
        return None
    return sum(f.stat().st_size for f in folder.glob("*.json"))


def _bytes_per_value(section: Model) -> float:
    """Return the mean bytes of a source's stored value, from the headers of local safetensors
    files; else 4."""
    if section.gguf_file is not None or not source.is_local(section.source, section.base):
        return 4.0
    folder = model_folder(source.resolve(section).folder)
    entries = [e for file in folder.glob("*.safetensors") for e in read_header(file).values()]
    values = sum(prod(e.shape) for e in entries)
    return sum(e.end - e.begin for e in entries) / values if values else 4.0


STAGE = Stage(
    name="load",
    version=VERSION,
    run=run,
    packages=("transformers", "tokenizers", "onnx", "onnxruntime", "peft"),
    files=files,
    estimate=estimate,
    shapes=headers.read_shapes,
)
