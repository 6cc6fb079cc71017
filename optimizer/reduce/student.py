"""Write the recipe's student, another and smaller model, which can learn from the reference and
take its place (reduce.student).

Inputs and outputs stay the reference's: its tokenizer, and its contract but for the sizes of the
student's KV cache and vectors. So both vocabularies must be equal, id by id. The student's own
weights are written as load reads them; those of a folder without weights are initialised.

out/checkpoint/     the student's config.json and model.safetensors, the reference's tokenizer, the
                    licences of both
out/contract.json   as the reference's
out/source.json     as the reference's, with the student's `parameters`, and student: its source
out/reduced.json    version 1; student: {source, revision, seed, initialized}; sizes, weights.all
                    and layers (none) as in structure/write.py; importance and methods: none
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.progress import say
from optimizer.foundation.reading import reading
from optimizer.harness import contract as contracts
from optimizer.load import headers, source
from optimizer.load import stage as load
from optimizer.load.config.config import check_task, read_config
from optimizer.load.config.model_folder import model_folder
from optimizer.load.tokenizer.student_vocabulary import PLACE, report_at_student
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import build_skeleton, choose_auto_class
from optimizer.recipe.reduce import Student
from optimizer.recipe.schema import Model, Reduction
from optimizer.reduce.structure.write import REDUCED, VERSION, WEIGHTS, write_document
from optimizer.store import Estimate, Shapes

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
LABELS = ("id2label", "label2id")
CONTRACT, SOURCE = "contract.json", "source.json"


def write(section: Reduction, reference: Path, out: Path, progress: Path) -> None:
    """Write the student. Raises CheckpointError for a student that does not fit the reference, and
    load's errors for a student that cannot be read.

    reference: folder of load
    progress: empty folder below `out`
    """
    chosen = _student(section)
    model = _model(section, reference)
    loaded = progress / "loaded"
    loaded.mkdir()
    with report_at_student():
        resolved = source.resolve(model)
        folder = model_folder(resolved.folder)
        with own_code.contain(folder), reading(folder, own_faults=True):
            _check_config(model, folder, reference)
            empty = _has_no_weights(chosen, folder)
            if empty:
                say(f"reduce: {chosen.source} has no weights; initialising them")
                folder = _initialise(chosen, model, folder, reference, progress / "initialised")
        local = model.model_copy(update={"source": str(folder.resolve())}) if empty else model
        load.run(local, out=loaded)
    _check_tokens(loaded, reference)
    _check_answers(loaded, reference)
    _place(loaded, reference, out)
    origin = {**read_json(loaded / SOURCE), "source": chosen.source}
    own = {"source": chosen.source, "revision": origin["revision"], "seed": chosen.seed}
    own["initialized"] = empty
    of_reference = read_json(reference / SOURCE)
    described = {**of_reference, "parameters": origin["parameters"], "student": origin}
    write_document(out / SOURCE, described)
    write_document(out / REDUCED, _document(own, section.task, reference, out))


def check(section: Reduction, reference: Path) -> None:
    """Raise the errors of `write` that follow from the configs; only these are fetched from a
    hub."""
    model = _model(section, reference)
    with report_at_student():
        folder = model_folder(source.peek(model).folder)
        with own_code.contain(folder), reading(folder, own_faults=True):
            _check_config(model, folder, reference)


def files(section: Reduction) -> Mapping[str, str]:
    """Return {name: digest} of the student's files."""
    with report_at_student():
        return source.digest_source(_bare(section))


def shapes(section: Reduction) -> Shapes:
    """Return the shapes of the student's tensors."""
    with report_at_student():
        return headers.read_shapes(_bare(section))


def estimate(section: Reduction) -> Estimate:
    """Estimate the stage in the same way as stage load for the student."""
    with report_at_student():
        model = _bare(section)
        return load.estimate(model, headers.read_shapes(model))


def _student(section: Reduction) -> Student:
    student = section.reduce.student
    assert student is not None
    return student


def _bare(section: Reduction) -> Model:
    """Return the recipe section with which load reads the student: its own, without settings of the
    reference."""
    chosen = _student(section)
    own = chosen.model_dump(include={"source", "revision", "subfolder"})
    return Model(task=section.task, base=chosen.base, **own)


def _model(section: Reduction, reference: Path) -> Model:
    """Return the recipe section by which load reads the student: that of `_bare` with the
    reference's maximum length, pooling and normalization."""
    contract = contracts.read(reference / CONTRACT)
    fields = {
        "max_length": contract.text.max_length,
        "pooling": contract.pooling,
        "normalize": contract.normalize,
    }
    return _bare(section).model_copy(update=fields)


def _check_config(model: Model, folder: Path, reference: Path) -> None:
    """Check that the architecture fits the task, and vocabulary and labels the reference."""
    config = read_config(folder, model)
    check_task(config, model, folder)
    rows, expected = config.vocab_size, open_checkpoint(reference).config["vocab_size"]
    if rows != expected:
        raise CheckpointError(
            f"the student's vocabulary has {rows} tokens and the reference's {expected}",
            where=f"{folder / 'config.json'}: vocab_size",
            accepted=f"{expected}, with the reference's tokenizer",
            fix="Use a student with the reference's own vocabulary.",
        )
    labels = contracts.read(reference / CONTRACT).labels
    if labels is not None and not _mere_config(folder) and len(config.id2label) != len(labels):
        raise CheckpointError(
            f"the student has {len(config.id2label)} labels and the reference {len(labels)}",
            where=f"{folder / 'config.json'}: id2label",
            accepted=", ".join(labels),
        )


def _mere_config(folder: Path) -> bool:
    return not any(file for pattern in source.WEIGHTS for file in folder.glob(pattern))


def _has_no_weights(chosen: Student, folder: Path) -> bool:
    """Return True where the student is a local folder without weights. A fetched folder may have
    weights in a format that was not fetched, which load reports."""
    local = not chosen.source.startswith(source.PACKAGE) and source.is_local(
        chosen.source, chosen.base
    )
    return local and _mere_config(folder)


def _initialise(chosen: Student, model: Model, folder: Path, reference: Path, out: Path) -> Path:
    """Write a model with transformers' initial weights to `out`; return the folder."""
    config = read_config(folder, model)
    labels = contracts.read(reference / CONTRACT).labels
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen.seed)
        new = choose_auto_class(model.task, config.model_type).from_config(
            config, dtype=torch.float32
        )
    with quiet():
        new.save_pretrained(out)
    beside = folder if (folder / "tokenizer.json").is_file() else reference / "checkpoint"
    for file in sorted(f for f in beside.iterdir() if f.is_file()):
        licence = beside != folder and any(file.match(p) for p in source.LICENCES)
        if file.suffix != ".safetensors" and not licence and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
    return out


def _check_tokens(loaded: Path, reference: Path) -> None:
    """Check that every token has the same id in both tokenizers."""
    from tokenizers import Tokenizer

    student, expected = (
        Tokenizer.from_file(str(f / "checkpoint" / "tokenizer.json")).get_vocab()
        for f in (loaded, reference)
    )
    differing = sorted(
        t for t in student.keys() | expected.keys() if student.get(t) != expected.get(t)
    )
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"{len(differing)} tokens have other ids than in the reference's tokenizer, the first "
            f"of them {first!r} ({student.get(first)}; in the reference {expected.get(first)})",
            where=PLACE,
            accepted="the reference's tokenizer, id by id",
            fix="Use a student with the reference's own vocabulary.",
        )


def _check_answers(loaded: Path, reference: Path) -> None:
    """Check that inputs and outputs are the reference's; embeddings may have another width."""
    student, expected = (contracts.read(folder / CONTRACT) for folder in (loaded, reference))
    if student.inputs != expected.inputs:
        takes, accepted = (", ".join(i.name for i in c.inputs) for c in (student, expected))
        raise CheckpointError(
            f"the student's inputs are {takes}, and the reference's {accepted}",
            where=PLACE,
            accepted=accepted,
            fix="Use a student of an architecture with the same inputs.",
        )
    if student.outputs != expected.outputs and expected.vectors.file is not None:
        raise CheckpointError(
            f"the student's output has axes {student.outputs[0].axes}, and the reference's layers "
            f"(Dense, LayerNorm) take {expected.outputs[0].axes[-1]} numbers",
            where=PLACE,
            accepted="a student of the reference's own width",
        )
    if student.outputs != expected.outputs and expected.pooling is None:
        raise CheckpointError(
            f"the student's output has axes {student.outputs[0].axes}, and the reference's "
            f"{expected.outputs[0].axes}",
            where=PLACE,
            accepted="outputs with the same axes",
            fix="Use a student of the reference's own width, or task sentence-embedding.",
        )


def _place(loaded: Path, reference: Path, out: Path) -> None:
    """Write the student's weights and config beside the reference's other files, such as the
    tokenizer."""
    folder, original = out / "checkpoint", reference / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in sorted(original.iterdir()):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    for file in (f for pattern in source.LICENCES for f in (loaded / "checkpoint").glob(pattern)):
        shutil.copyfile(file, folder / f"{file.name}.student")
    (loaded / "checkpoint" / WEIGHTS).rename(folder / WEIGHTS)
    config = read_json(original / "config.json")
    same = {name: config[name] for name in (*TOKENS, *LABELS) if name in config}
    write_document(
        folder / "config.json", {**read_json(loaded / "checkpoint" / "config.json"), **same}
    )
    contract, of_student = read_json(reference / CONTRACT), read_json(loaded / CONTRACT)
    contract["outputs"] = of_student["outputs"]
    if contract.get("generation") is not None:
        sizes = ("layers", "kv_heads", "head_dim")
        contract["generation"] |= {name: of_student["generation"][name] for name in sizes}
    write_document(out / CONTRACT, contract)


def _document(student: Mapping[str, Any], task: str, reference: Path, out: Path) -> dict[str, Any]:
    opened = [open_checkpoint(folder) for folder in (reference, out)]
    counted = [sum(prod(c.shape(name)) for name in c.tensors) for c in opened]
    fields = {"blocks": "num_hidden_layers", "width": "hidden_size"}
    models: list[Any] = [build_skeleton(checkpoint, task) for checkpoint in opened]
    configs = [model.config for model in models]
    return {
        "version": VERSION,
        "student": dict(student),
        "importance": None,
        "methods": [],
        "sizes": {k: [int(getattr(c, field)) for c in configs] for k, field in fields.items()},
        "weights": {"all": counted},
        "layers": [],
        "left_out": [],
    }


def is_initialized(folder: Path) -> bool:
    """Return True where the model in `folder` has random initial weights, and so no trained
    embeddings."""
    file = folder / REDUCED
    student = json.loads(file.read_text("utf-8")).get("student") if file.is_file() else None
    return bool(student and student["initialized"])
