"""reduce.student: a smaller model of its own, laid out so that it can learn from the reference and
stand in its place.

What goes in and comes out stays the reference's: its tokenizer, and its contract but for the sizes
of the student's cache and vectors. So the vocabularies must be one, id by id. Nothing is cut: what
is written are the student's own weights as load reads them, or, of a folder without weights, those
it is initialised with.

out/checkpoint/     the student's config.json and model.safetensors, the reference's tokenizer, the
                    licences of both
out/contract.json   as the reference's
out/source.json     as the reference's, with `parameters` counted again, and student: its own
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
from optimizer.load.config.config import check_task, model_folder, read_config
from optimizer.load.tokenizer.student_vocabulary import PLACE, named_as_student
from optimizer.model.checkpoint import own_code
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.model.checkpoint.model import auto_class, skeleton
from optimizer.recipe.reduce import Student
from optimizer.recipe.schema import Model, Reduction
from optimizer.reduce.structure.write import REDUCED, VERSION, WEIGHTS, write_document
from optimizer.store import Estimate, Shapes

TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
LABELS = ("id2label", "label2id")
CONTRACT, SOURCE = "contract.json", "source.json"


def write(section: Reduction, reference: Path, out: Path, progress: Path) -> None:
    """reference: what load wrote; progress: an empty folder below `out`. Raises CheckpointError for
    a student that does not fit the reference, and what load raises for one that it cannot read."""
    chosen = _student(section)
    model = _model(section, reference)
    loaded = progress / "loaded"
    loaded.mkdir()
    with named_as_student():
        resolved = source.resolve(model)
        folder = model_folder(resolved.folder)
        with own_code.contained(folder), reading(folder, own_faults=True):
            _check_config(model, folder, reference)
            empty = _has_no_weights(chosen, folder)
            if empty:
                say(f"reduce: {chosen.source} has no weights; they are initialised")
                folder = _initialised(chosen, model, folder, reference, progress / "initialised")
        local = model.model_copy(update={"source": str(folder)}) if empty else model
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
    """Raise what `write` would by the configs alone; of a student on a hub only that is fetched."""
    model = _model(section, reference)
    with named_as_student():
        folder = model_folder(source.peek(model).folder)
        with own_code.contained(folder), reading(folder, own_faults=True):
            _check_config(model, folder, reference)


def files(section: Reduction) -> Mapping[str, str]:
    """The digests of the student's files."""
    with named_as_student():
        return source.digests(_bare(section))


def shapes(section: Reduction) -> Shapes:
    """The student's own."""
    with named_as_student():
        return headers.shapes(_bare(section))


def estimate(section: Reduction) -> Estimate:
    """As load's of the student."""
    with named_as_student():
        model = _bare(section)
        return load.estimate(model, headers.shapes(model))


def _student(section: Reduction) -> Student:
    student = section.reduce.student
    assert student is not None
    return student


def _bare(section: Reduction) -> Model:
    """The student as load takes it, before anything is known of the reference."""
    chosen = _student(section)
    own = chosen.model_dump(include={"source", "revision", "subfolder"})
    return Model(task=section.task, **own)


def _model(section: Reduction, reference: Path) -> Model:
    """The same, with what the reference's contract says of texts and vectors."""
    contract = contracts.read(reference / CONTRACT)
    fields = {
        "max_length": contract.text.max_length,
        "pooling": contract.pooling,
        "normalize": contract.normalize,
    }
    return _bare(section).model_copy(update=fields)


def _check_config(model: Model, folder: Path, reference: Path) -> None:
    """The architecture is of the task's kind, and its vocabulary as large as the reference's."""
    config = read_config(folder, model)
    check_task(config, model, folder)
    rows, known = config.vocab_size, open_checkpoint(reference).config["vocab_size"]
    if rows != known:
        raise CheckpointError(
            f"its vocabulary has {rows} tokens and the reference's {known}, so a token is not the "
            "same in both",
            where=f"{folder / 'config.json'}: vocab_size",
            accepted=f"{known}, with the reference's tokenizer",
            fix="Use a student of the reference's own vocabulary.",
        )
    labels = contracts.read(reference / CONTRACT).labels
    if labels is not None and not _mere_config(folder) and len(config.id2label) != len(labels):
        raise CheckpointError(
            f"it answers with {len(config.id2label)} labels and the reference with {len(labels)}",
            where=f"{folder / 'config.json'}: id2label",
            accepted=", ".join(labels),
        )


def _mere_config(folder: Path) -> bool:
    return not any(file for pattern in source.WEIGHTS for file in folder.glob(pattern))


def _has_no_weights(chosen: Student, folder: Path) -> bool:
    """Of a folder of one's own that has none; what is fetched may be of a kind that was left
    there, which load says."""
    own = not chosen.source.startswith(source.PACKAGE) and source.is_local(chosen.source)
    return own and _mere_config(folder)


def _initialised(chosen: Student, model: Model, folder: Path, reference: Path, out: Path) -> Path:
    """A folder with the weights that transformers gives a new model of this config."""
    config = read_config(folder, model)
    labels = contracts.read(reference / CONTRACT).labels
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: i for i, label in enumerate(labels)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen.seed)
        new = auto_class(model.task).from_config(config, dtype=torch.float32)
    with quiet():
        new.save_pretrained(out)
    beside = folder if (folder / "tokenizer.json").is_file() else reference / "checkpoint"
    for file in sorted(f for f in beside.iterdir() if f.is_file()):
        licence = beside != folder and any(file.match(p) for p in source.LICENCES)
        if file.suffix != ".safetensors" and not licence and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)
    return out


def _check_tokens(loaded: Path, reference: Path) -> None:
    """Every token has one id in both."""
    from tokenizers import Tokenizer

    own, theirs = (
        Tokenizer.from_file(str(f / "checkpoint" / "tokenizer.json")).get_vocab()
        for f in (loaded, reference)
    )
    other = sorted(t for t in own.keys() | theirs.keys() if own.get(t) != theirs.get(t))
    if other:
        first = other[0]
        raise CheckpointError(
            f"{len(other)} tokens have other ids than in the reference's tokenizer, the first of "
            f"them {first!r} ({own.get(first)}; in the reference {theirs.get(first)})",
            where=PLACE,
            accepted="the reference's tokenizer, id by id",
            fix="Use a student of the reference's own vocabulary.",
        )


def _check_answers(loaded: Path, reference: Path) -> None:
    """It takes what the reference takes, and answers in its form; embeddings may be of another
    width."""
    own, theirs = (contracts.read(folder / CONTRACT) for folder in (loaded, reference))
    if own.inputs != theirs.inputs:
        takes, known = (", ".join(i.name for i in c.inputs) for c in (own, theirs))
        raise CheckpointError(
            f"it takes {takes}, and the reference {known}",
            where=PLACE,
            accepted=known,
            fix="Use a student of an architecture that takes the same.",
        )
    if own.outputs != theirs.outputs and theirs.pooling is None:
        raise CheckpointError(
            f"it answers {own.outputs[0].axes}, and the reference {theirs.outputs[0].axes}",
            where=PLACE,
            accepted="answers of one form",
            fix="Use a student of the reference's own width, or task sentence-embedding.",
        )


def _place(loaded: Path, reference: Path, out: Path) -> None:
    """The student's weights and config, and all else the reference's."""
    folder, whole = out / "checkpoint", reference / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for file in sorted(whole.iterdir()):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    for file in (f for pattern in source.LICENCES for f in (loaded / "checkpoint").glob(pattern)):
        shutil.copyfile(file, folder / f"{file.name}.student")
    (loaded / "checkpoint" / WEIGHTS).rename(folder / WEIGHTS)
    theirs = read_json(whole / "config.json")
    same = {name: theirs[name] for name in (*TOKENS, *LABELS) if name in theirs}
    write_document(
        folder / "config.json", {**read_json(loaded / "checkpoint" / "config.json"), **same}
    )
    contract, own = read_json(reference / CONTRACT), read_json(loaded / CONTRACT)
    contract["outputs"] = own["outputs"]
    if contract.get("generation") is not None:
        sizes = ("layers", "kv_heads", "head_dim")
        contract["generation"] |= {name: own["generation"][name] for name in sizes}
    write_document(out / CONTRACT, contract)


def _document(student: Mapping[str, Any], task: str, reference: Path, out: Path) -> dict[str, Any]:
    """Of reduced.json."""
    opened = [open_checkpoint(folder) for folder in (reference, out)]
    counted = [sum(prod(c.shape(name)) for name in c.tensors) for c in opened]
    fields = {"blocks": "num_hidden_layers", "width": "hidden_size"}
    models: list[Any] = [skeleton(checkpoint, task) for checkpoint in opened]
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


def initialized(folder: Path) -> bool:
    """Whether a model began without weights, and so without embeddings of its own."""
    file = folder / REDUCED
    student = json.loads(file.read_text("utf-8")).get("student") if file.is_file() else None
    return bool(student and student["initialized"])
