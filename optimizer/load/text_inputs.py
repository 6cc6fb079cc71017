"""Prepare the contract of a text model: its tokenizer, and the pooling of a sentence embedding."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.progress import say
from optimizer.load.config.modules_json import module_folder, read_modules
from optimizer.load.generation import context, eos_ids, generation, read_generation_config
from optimizer.load.preparation import Described, Preparation
from optimizer.load.tokenizer import tokenizer as tokenizers
from optimizer.load.tokenizer.tokenizer import TEXTS as SENTENCES
from optimizer.load.tokenizer.tokenizer import max_length
from optimizer.model.checkpoint.checkpoint import read_json
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


def convert(d: Described, out: Path) -> Any:
    """Write tokenizer.json; return transformers' tokenizer."""
    rows = int(d.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    trusted = d.section.trust_remote_code
    return tokenizers.convert(d.files, out, rows, trusted, d.task.generates)


def sections(d: Described, tokenizer: Any) -> dict[str, Any]:
    """{section of the contract: value}: tokenizer; for a decoder also generation; for a sentence
    embedding also pooling and normalize. tokenizer: result of `convert`."""
    values: dict[str, Any] = {}
    if d.task.generates:
        values["generation"] = generation(d.config, tokenizer, d.files)
    if "pooling" in d.task.sections:
        values["pooling"], values["normalize"] = _pooling_and_normalize(d.section, d.root)
        _check_lower_case(d.root, tokenizer)
    values["tokenizer"] = _tokenizer(d, tokenizer)
    if d.task.generates:
        values["generation"]["context"] = values["tokenizer"]["max_length"]
    return values


def widths(d: Described, sections: Mapping[str, Any]) -> dict[str, int]:
    """{"width": size of the hidden states}, for a decoder with "vocabulary": size of the logits."""
    sizes = {"width": int(d.config.hidden_size)}
    if d.task.generates:
        sizes["vocabulary"] = sections["generation"]["vocabulary"]
    if d.task.fills:
        sizes["vocabulary"] = int(d.config.vocab_size)
    return sizes


def inputs(
    d: Described, sections: Mapping[str, Any]
) -> dict[str, tuple[str, tuple[str | int, ...]]]:
    """{input: (dtype, axes)}; segment ids only for models with two or more of them."""
    del sections
    names = [*d.task.inputs.arrays, *(d.task.arrays or ())]
    if d.task.generates:
        names_taken = [n for n in names if n != POSITIONS or d.family.position_ids]
        return {n: ("int64", DECODER_INPUTS[n]) for n in names_taken}
    takes = inspect.signature(d.model.forward).parameters
    segments = int(getattr(d.config, "type_vocab_size", 0) or 0) > 1
    return {n: ("int64", ENCODER_AXES) for n in names if n in takes and (n != SEGMENTS or segments)}


def _tokenizer(d: Described, tokenizer: Any) -> dict[str, Any]:
    section, config, family, folder = d.section, d.config, d.family, d.files
    pad, pad_id = tokenizer.pad_token, tokenizer.pad_token_id
    generates = d.task.generates
    if pad is None and generates:  # any token works, because the mask hides it
        pad_id = eos_ids(config, read_generation_config(folder), tokenizer.eos_token_id)[0]
        pad = tokenizer.convert_ids_to_tokens(pad_id)
    if pad is None:
        raise CheckpointError(
            "the tokenizer has no padding token, so texts cannot be batched",
            where=str(folder / "tokenizer_config.json"),
            fix='Set "pad_token" there to the padding token that the model was trained with.',
        )
    if family.positions_after_padding and tokenizer.pad_token_id != config.pad_token_id:
        raise CheckpointError(
            f"the tokenizer pads with id {tokenizer.pad_token_id}, but the model gives positions "
            f"to all tokens other than {config.pad_token_id}",
            where="config.json: pad_token_id",
            fix="Use the tokenizer that the model was trained with.",
        )
    positions = context(config) if generates else getattr(config, "max_position_embeddings", None)
    if positions is not None and family.positions_after_padding:
        positions -= int(config.pad_token_id) + 1
    # a decoder's tokenizer often has a default or less than the trained length
    longest = positions if generates and positions else max_length(folder, d.root, positions)
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
            "neither the tokenizer nor config.json limits the length of a text",
            where=str(folder),
            fix="Set model.max_length in the recipe.",
        )
    return {
        "file": "tokenizer.json",
        "max_length": longest,
        "pad_id": int(pad_id),
        "pad_token": str(pad),
        "pad_type_id": int(getattr(tokenizer, "pad_token_type_id", 0)),
        **(_mask(tokenizer, folder) if d.task.fills else {}),
    }


def _mask(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """{"mask_id", "mask_token"} of transformers' tokenizer."""
    if tokenizer.mask_token is None:
        raise CheckpointError(
            "the tokenizer has no mask token, so nothing in a text can be filled in",
            where=str(folder / "tokenizer_config.json"),
            fix='Set "mask_token" there to the mask token that the model was trained with.',
        )
    return {"mask_id": int(tokenizer.mask_token_id), "mask_token": str(tokenizer.mask_token)}


def _pooling_and_normalize(section: Model, root: Path) -> tuple[str, bool]:
    """("mean" or "cls", True to normalize) of a sentence embedding: each from the recipe, else from
    modules.json in `root`, else mean and True."""
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
                    fix="If you want the embedding without this module, set task: "
                    "feature-extraction.",
                )
    if (root / PROMPTS).is_file() and read_json(root / PROMPTS).get("default_prompt_name"):
        say(f"load: {PROMPTS} has a default prompt, which is not added to texts: add it yourself")
    if section.pooling is not None and pooling not in (None, section.pooling):
        say(f"load: the recipe's pooling {section.pooling} replaces the checkpoint's {pooling}")
    if section.normalize is not None:
        normalize = section.normalize
    return section.pooling or pooling or "mean", normalize


def _check_lower_case(root: Path, tokenizer: Any) -> None:
    """Raise CheckpointError where sentence-transformers would lower-case texts before a tokenizer
    that keeps upper case."""
    file = root / "sentence_bert_config.json"
    if not file.is_file() or not read_json(file).get("do_lower_case"):
        return
    for text in SENTENCES:
        if tokenizer(text)["input_ids"] != tokenizer(text.lower())["input_ids"]:
            raise CheckpointError(
                "do_lower_case is true, but the tokenizer keeps upper case, and texts are not "
                "lower-cased before it",
                where=str(file),
                fix='Put {"type": "Lowercase"} in the normalizer of tokenizer.json.',
            )


def _pooling(folder: Path, section: Model) -> str | None:
    pooling_config = read_json(folder / "config.json")
    # newer versions of sentence-transformers write one word in place of a flag per mode
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
        fix="Set model.pooling in the recipe if one of these suits you.",
    )


TEXTS = Preparation(
    noun="text model",
    first="input_ids",
    convert=convert,
    sections=sections,
    inputs=inputs,
    widths=widths,
)
