"""The I/O contract of a model: what goes in, what comes out, and what is done around it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from optimizer import reading
from optimizer.errors import CheckpointError, RecipeError
from optimizer.harness import tasks
from optimizer.harness.contract import SECTIONS, VERSION
from optimizer.load.checkpoint import GET_AGAIN, read_json
from optimizer.load.families import Family
from optimizer.load.generation import advice, context, eos_ids, generation
from optimizer.load.tokenizer import TEXTS, max_length
from optimizer.progress import say
from optimizer.recipe.schema import Model

SEGMENTS, POSITIONS = "token_type_ids", "position_ids"
ENCODER_AXES = ("batch", "sequence")
DECODER_INPUTS = {  # name: axes
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "total"),
    POSITIONS: ("batch", "sequence"),
}
PROMPTS = "config_sentence_transformers.json"
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}


def contract(
    section: Model,
    config: Any,
    model: nn.Module,
    family: Family,
    tokenizer: Any,
    folder: Path,
    root: Path,
) -> dict[str, Any]:
    """The document of contract.json, version 2.

    folder: the model's files; root: where modules.json of a sentence-transformers model is (the
    same, or the folder above). Raises CheckpointError for what a contract cannot say.
    """
    task = tasks.task(section.task)
    sections: dict[str, Any] = dict.fromkeys(SECTIONS)
    widths = {"width": int(config.hidden_size)}
    if task.generates:
        sections["generation"] = generation(config, tokenizer, folder)
        widths["vocabulary"] = sections["generation"]["vocabulary"]
    if task.classifies:
        sections["labels"] = _labels(config)
        widths["labels"] = len(sections["labels"])
        if not task.per_position:
            _check_one_label(config)
    if "pooling" in task.sections:
        sections["pooling"], sections["normalize"] = _sentence(section, root)
        _check_lower_case(root, tokenizer)
    spec = _tokenizer(section, config, family, tokenizer, folder, root)
    sections["tokenizer"] = spec
    if task.generates:
        sections["generation"]["context"] = spec["max_length"]
    return {
        "version": VERSION,
        "task": task.name,
        "input_kind": task.inputs.name,
        "inputs": [
            {"name": name, "dtype": "int64", "axes": list(axes)}
            for name, axes in _inputs(task, model, config, family).items()
        ],
        "outputs": [
            {
                "name": task.output,
                "dtype": "float32",
                "axes": [widths.get(axis, axis) for axis in task.axes],
            }
        ],
        **sections,
    }


def _inputs(
    task: tasks.Task, model: nn.Module, config: Any, family: Family
) -> dict[str, tuple[str, ...]]:
    """{name: axes} of the arrays that the model takes; segment ids only when it has two kinds of
    them."""
    names = [*task.inputs.arrays, *(task.arrays or ())]
    if task.generates:
        return {n: DECODER_INPUTS[n] for n in names if n != POSITIONS or family.position_ids}
    takes = inspect.signature(model.forward).parameters
    segments = int(getattr(config, "type_vocab_size", 0) or 0) > 1
    return {n: ENCODER_AXES for n in names if n in takes and (n != SEGMENTS or segments)}


def _check_one_label(config: Any) -> None:
    """Several labels at once need a sigmoid each; the softmax of this task would be wrong."""
    if getattr(config, "problem_type", None) == "multi_label_classification":
        raise CheckpointError(
            "multi_label_classification is not covered: a text gets one label here",
            where="config.json: problem_type",
            accepted="single_label_classification, regression, or none",
        )


def _label_name(i: object, label: object) -> str:
    if not isinstance(label, str | int | float):
        raise CheckpointError(
            f"{str(label)[:80]!r} was found",
            where=f"config.json: id2label.{i}",
            accepted="the name of a label",
        )
    return str(label)


def _labels(config: Any) -> list[str]:
    named = {int(i): _label_name(i, label) for i, label in config.id2label.items()}
    if sorted(named) != list(range(len(named))):
        raise CheckpointError(
            f"the ids are {sorted(named)}",
            where="config.json: id2label",
            accepted=f"every id from 0 to {len(named) - 1}",
            fix="Number the labels in the order of the classifier's outputs.",
        )
    labels = [named[i] for i in range(len(named))]
    twice = [label for i, label in enumerate(labels) if label in labels[:i]]
    if twice:
        raise CheckpointError(
            f"two ids are both called {twice[0]!r}, so an answer would not say which it is",
            where="config.json: id2label",
            accepted="a name of its own for every id",
            fix="Rename one of them.",
        )
    return labels


def _tokenizer(
    section: Model, config: Any, family: Family, tokenizer: Any, folder: Path, root: Path
) -> dict[str, Any]:
    pad, pad_id = tokenizer.pad_token, tokenizer.pad_token_id
    generates = tasks.task(section.task).generates
    if pad is None and generates:  # any token will do: the mask hides it
        pad_id = eos_ids(config, advice(folder), tokenizer.eos_token_id)[0]
        pad = tokenizer.convert_ids_to_tokens(pad_id)
    if pad is None:
        raise CheckpointError(
            "the tokenizer has no padding token, so texts cannot be batched",
            where=str(folder / "tokenizer_config.json"),
            fix='Set "pad_token" there to the token the model was trained with.',
        )
    if family.positions_after_padding and tokenizer.pad_token_id != config.pad_token_id:
        raise CheckpointError(
            f"the tokenizer does not fit: it pads with id {tokenizer.pad_token_id} and the model "
            f"counts positions from the tokens that are not {config.pad_token_id}",
            where="config.json: pad_token_id",
            fix="Use the tokenizer the model was trained with.",
        )
    positions = context(config) if generates else getattr(config, "max_position_embeddings", None)
    if positions is not None and family.positions_after_padding:
        positions -= int(config.pad_token_id) + 1
    # a decoder's tokenizer often says less than it was trained for, or a default
    longest = positions if generates and positions else max_length(folder, root, positions)
    if section.max_length is not None:
        if positions is not None and section.max_length > positions:
            raise RecipeError(
                f"{section.max_length} is more than the {positions} positions the model has",
                where="model.max_length",
                accepted=f"2..{positions}",
            )
        longest = section.max_length
    if longest is None:
        raise CheckpointError(
            "neither the tokenizer nor config.json says how long a text may be",
            where=str(folder),
            fix="Set model.max_length in the recipe.",
        )
    return {
        "file": "tokenizer.json",
        "max_length": longest,
        "pad_id": int(pad_id),
        "pad_token": str(pad),
        "pad_type_id": int(getattr(tokenizer, "pad_token_type_id", 0)),
    }


def _sentence(section: Model, root: Path) -> tuple[str, bool]:
    """(pooling, normalize) of a sentence embedding.

    The recipe decides; what it leaves open the checkpoint's modules.json says; else mean, true.
    """
    pooling: str | None = None
    normalize = True
    if (root / "modules.json").is_file():
        normalize = any(str(m.get("type", "")).endswith(".Normalize") for m in read_modules(root))
        for module in read_modules(root):
            kind = str(module.get("type", "")).rpartition(".")[2]
            if kind == "Pooling":
                pooling = _pooling(module_folder(root, module), section)
            elif kind not in ("Transformer", "Normalize"):
                raise CheckpointError(
                    f"sentence-transformers module {kind} ({module.get('path')}) is not covered",
                    where=str(root / "modules.json"),
                    accepted="Transformer, Pooling (mean or cls), Normalize",
                    fix="Leave it out only if the embedding without it is what you want: set "
                    "task: feature-extraction.",
                )
    if (root / PROMPTS).is_file() and read_json(root / PROMPTS).get("default_prompt_name"):
        say(f"load: {PROMPTS} names a default prompt; it is not put before texts: do so yourself")
    if section.pooling is not None and pooling not in (None, section.pooling):
        say(f"load: pooling is {section.pooling} by the recipe; the checkpoint says {pooling}")
    if section.normalize is not None:
        normalize = section.normalize
    return section.pooling or pooling or "mean", normalize


def _check_lower_case(root: Path, tokenizer: Any) -> None:
    """sentence-transformers can lower texts before the tokenizer sees them; nothing here does."""
    file = root / "sentence_bert_config.json"
    if not file.is_file() or not read_json(file).get("do_lower_case"):
        return
    for text in TEXTS:
        if tokenizer(text)["input_ids"] != tokenizer(text.lower())["input_ids"]:
            raise CheckpointError(
                "do_lower_case is true and the tokenizer keeps upper case, so texts would have to "
                "be changed before they are tokenized",
                where=str(file),
                fix='Put {"type": "Lowercase"} in the normalizer of tokenizer.json.',
            )


def read_modules(root: Path) -> list[dict[str, Any]]:
    """The list in modules.json. Raises CheckpointError when it is not one."""
    file = root / "modules.json"
    document = reading.read_json(file, fix=GET_AGAIN)
    modules = document if isinstance(document, list) else [None]
    for module in modules:
        if not isinstance(module, dict) or not isinstance(module.get("idx"), int):
            raise CheckpointError(
                "it is no list of modules, each with an idx", where=str(file), fix=GET_AGAIN
            )
        if not isinstance(module.get("path", ""), str):
            raise CheckpointError(
                f"path {module['path']!r} is not a string", where=str(file), fix=GET_AGAIN
            )
        module_folder(root, module)
    return sorted(modules, key=lambda m: m["idx"])


def module_folder(root: Path, module: Mapping[str, Any]) -> Path:
    """The folder of one module of modules.json. Raises CheckpointError when it lies outside `root`:
    files there would be read, and be in no digest."""
    path = str(module.get("path", ""))
    with reading.reading(f"{root / 'modules.json'}: path {path!r}"):
        folder = (root / path).resolve()
    if not folder.is_relative_to(root.resolve()):
        raise CheckpointError(
            f"path {path!r} leaves the folder",
            where=str(root / "modules.json"),
            accepted="a folder inside it",
        )
    return folder


def _pooling(folder: Path, section: Model) -> str | None:
    pooling_config = read_json(folder / "config.json")
    # newer versions of sentence-transformers write one word instead of a flag per mode
    modes = (
        [pooling_config["pooling_mode"]]
        if isinstance(pooling_config.get("pooling_mode"), str)
        else [
            POOLING.get(key, key)
            for key, on in pooling_config.items()
            if key.startswith("pooling_mode_") and on
        ]
    )
    if len(modes) == 1 and modes[0] in POOLING.values():
        return str(modes[0])
    if section.pooling is not None:
        return None
    raise CheckpointError(
        f"pooling {' + '.join(map(str, modes)) or 'none'} is not covered",
        where=str(folder / "config.json"),
        accepted="mean, cls",
        fix="Set model.pooling in the recipe if one of these serves you as well.",
    )
