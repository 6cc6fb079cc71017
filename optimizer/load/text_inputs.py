"""Prepare the contract of a text model: its tokenizer, and the pooling of a sentence embedding."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.embedding_settings import EmbeddingSettings
from optimizer.harness.inputs.text import MASK
from optimizer.load.config.model_folder import model_folder
from optimizer.load.generation import (
    check_rotary,
    read_context,
    read_eos_ids,
    read_generation,
    read_generation_config,
)
from optimizer.load.preparation import Described, Preparation
from optimizer.load.sentence import folder, logit_score, pair_template
from optimizer.load.tokenizer import tokenizer as tokenizers
from optimizer.load.tokenizer.tokenizer import TEXTS as SENTENCES
from optimizer.load.tokenizer.tokenizer import read_max_length
from optimizer.model.architectures import families
from optimizer.model.architectures.towers import TOWERS
from optimizer.recipe.answers import WINDOW, SpanAnswers

ENTAILS = "entail"  # beginning of a label's name, as transformers' pipeline finds it
SEGMENTS, POSITIONS = "token_type_ids", "position_ids"
ENCODER_AXES = ("batch", "sequence")
DECODER_INPUTS = {  # name: axes
    "input_ids": ("batch", "sequence"),
    "attention_mask": ("batch", "total"),
    POSITIONS: ("batch", "sequence"),
}


def convert(d: Described, out: Path) -> Any:
    """Write the checkpoint's tokenizer as tokenizer.json; return transformers' tokenizer."""
    rows = int(d.model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    trusted = d.section.trust_remote_code
    tokenizer = tokenizers.convert(d.files, out, rows, trusted, d.task.generates)
    if "embedding" in d.task.optional:
        _write_embedding(d, out, tokenizer)
    return tokenizer


def sections(d: Described, tokenizer: Any) -> dict[str, Any]:
    """Build the contract's sections for texts, {section: value}: tokenizer; for a decoder also
    generation; for a sentence embedding also pooling, normalize and embedding; for a sparse one
    embedding and sparse.

    tokenizer: result of `convert`
    """
    values: dict[str, Any] = {}
    check_rotary(d.config)
    if tokenizer.truncation_side != "right" and not d.task.generates:
        say(
            "load: warning: the end of a text that is too long is cut here, and transformers cuts "
            f"its beginning (tokenizer_config.json: truncation_side: {tokenizer.truncation_side})"
        )
    if d.task.generates:
        values["generation"] = read_generation(d.config, tokenizer, d.files, [*d.section.hot])
    embeds = "embedding" in d.task.optional
    reads_as_library = d.task.ranks or (embeds and folder.is_sentence_folder(d.root))
    if logit_score.takes(d.section, model_folder(d.root)):
        values |= _pair_template(d, tokenizer)
    elif d.section.template is not None:
        raise RecipeError(
            "the model is a classifier, which reads a query and its document as its tokenizer "
            "joins them",
            where="model.template",
            accepted="no template, or a causal language model",
            fix="Remove it.",
        )
    elif reads_as_library and tokenizer.chat_template is not None:
        folder.check_plain_texts(d.files, d.task)
    if d.config.model_type in TOWERS:
        values |= _vector(d)
    elif d.task.weighs:
        values |= _sparse(d)
    elif embeds:
        values |= _embedding(d)
    values["tokenizer"] = _tokenizer(d, tokenizer)
    if d.task.extracts:
        values["answers"] = _answers(d, tokenizer, values["tokenizer"]["max_length"])
    if d.task.chooses:
        values["zero_shot"] = _zero_shot(d)
    if d.task.generates:
        values["generation"]["context"] = values["tokenizer"]["max_length"]
    return values


def widths(d: Described, sections: Mapping[str, Any]) -> dict[str, int]:
    """Return for the contract {"width": size of the hidden states}, for a decoder with
    "vocabulary": size of the logits."""
    tower = TOWERS.get(d.config.model_type)
    sizes = {"width": tower.width(d.config) if tower else int(d.config.hidden_size)}
    if d.task.generates:
        sizes["vocabulary"] = sections["generation"]["vocabulary"]
    if d.task.extracts:
        sizes["ends"] = len(d.task.joined)
    if d.task.reads_vocabulary:
        sizes["vocabulary"] = int(d.config.vocab_size)
    return sizes


def inputs(
    d: Described, sections: Mapping[str, Any]
) -> dict[str, tuple[str, tuple[str | int, ...]]]:
    """Describe for the contract a model's inputs for texts, {input: (dtype, axes)}; segment ids
    only for models with two or more of them."""
    del sections
    names = [*d.task.inputs.arrays, *(d.task.arrays or ())]
    if d.task.generates:
        names_taken = [n for n in names if n != POSITIONS or d.family.position_ids]
        return {n: ("int64", DECODER_INPUTS[n]) for n in names_taken}
    takes = inspect.signature(d.model.forward).parameters
    segments = int(getattr(d.config, "type_vocab_size", 0) or 0) > 1
    return {n: ("int64", ENCODER_AXES) for n in names if n in takes and (n != SEGMENTS or segments)}


def _tokenizer(d: Described, tokenizer: Any) -> dict[str, Any]:
    section, config, family, files = d.section, d.config, d.family, d.files
    pad, pad_id = tokenizer.pad_token, tokenizer.pad_token_id
    generates = d.task.generates
    if pad is None and generates:  # any token works, because the mask hides it
        pad_id = read_eos_ids(config, read_generation_config(files), tokenizer.eos_token_id)[0]
        pad = tokenizer.convert_ids_to_tokens(pad_id)
    if d.task.classifies and not d.task.per_position and families.is_language_model(config):
        pad, pad_id = _padding_of_classifier(d, tokenizer)
    if pad is None:
        raise CheckpointError(
            "the tokenizer has no padding token, so texts cannot be batched",
            where=str(files / "tokenizer_config.json"),
            fix='Set "pad_token" there to the padding token that the model was trained with.',
        )
    if family.positions_after_padding and tokenizer.pad_token_id != config.pad_token_id:
        raise CheckpointError(
            f"the tokenizer pads with id {tokenizer.pad_token_id}, but the model gives positions "
            f"to all tokens other than {config.pad_token_id}",
            where="config.json: pad_token_id",
            fix="Use the tokenizer that the model was trained with.",
        )
    positions = (
        read_context(config) if generates else getattr(config, "max_position_embeddings", None)
    )
    if positions is not None and family.positions_after_padding:
        positions -= int(config.pad_token_id) + 1
    # a decoder's tokenizer often has a default or less than the trained length
    longest = positions if generates and positions else read_max_length(files, d.root, positions)
    padded_to = _padded_to(d, tokenizer, positions)
    longest = padded_to or longest
    if longest is not None and d.task.extracts:
        longest = min(longest, WINDOW)
    if section.max_length is not None:
        if padded_to not in (None, section.max_length):
            raise RecipeError(
                f"{section.max_length} was found, and {config.model_type} reads every text padded "
                f"to {padded_to} tokens",
                where="model.max_length",
                accepted="no max_length",
            )
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
            where=str(files),
            fix="Set model.max_length in the recipe.",
        )
    return {
        "file": "tokenizer.json",
        "max_length": longest,
        "pad_id": int(pad_id),
        "pad_token": str(pad),
        "pad_type_id": int(getattr(tokenizer, "pad_token_type_id", 0)),
        **(_mask(tokenizer, files) if d.task.fills else {}),
        **({} if padded_to is None else {"padded_to": padded_to}),
    }


def _padded_to(d: Described, tokenizer: Any, positions: int | None) -> int | None:
    """Return for the contract the tokens to which every text is padded; None where padding is
    hidden. Raises CheckpointError for a tokenizer that pads on the left or gives a mask, and for a
    model with fewer positions."""
    tower = TOWERS.get(d.config.model_type)
    length = None if tower is None else tower.padded_to
    if length is None:
        return None
    if tokenizer.padding_side != "right":
        raise CheckpointError(
            f"the tokenizer pads on the {tokenizer.padding_side}, and {d.config.model_type} reads "
            "the padding too",
            where=f"{d.files / 'tokenizer_config.json'}: padding_side",
            accepted="right",
            fix="Use the tokenizer that the model was trained with.",
        )
    if MASK in tokenizer.model_input_names:
        raise CheckpointError(
            f"the tokenizer gives {MASK}, by which transformers would hide the padding that "
            f"{d.config.model_type} is trained to read",
            where=f"{d.files / 'tokenizer_config.json'}: model_input_names",
            accepted='["input_ids"], as published with SigLIP',
        )
    if positions is not None and positions < length:
        raise CheckpointError(
            f"the model has {positions} positions, and every text is padded to {length} tokens",
            where="config.json: max_position_embeddings",
            accepted=f"{length} or more",
        )
    return length


def _padding_of_classifier(d: Described, tokenizer: Any) -> tuple[str, int]:
    """Return for the contract (padding token, its id) of a decoder's classifier, which reads the
    last token of another id. Raises CheckpointError without one.
    """
    number = d.config.get_text_config().pad_token_id
    known = type(number) is int and number >= 0
    token = tokenizer.convert_ids_to_tokens(number) if known else None
    if token is None:
        raise CheckpointError(
            f"pad_token_id is {number}, and this classifier reads the last token that is not "
            "padding, so transformers answers one text at a time and no batch",
            where=f"{d.files / 'config.json'}: pad_token_id",
            accepted="the id of a token of the tokenizer",
            fix="Set it to the padding token that the classifier was trained with"
            + (f" ({tokenizer.pad_token_id})." if tokenizer.pad_token_id is not None else "."),
        )
    return str(token), int(number)


def _pair_template(d: Described, tokenizer: Any) -> dict[str, Any]:
    """Return {"template": parts} of a causal language model that ranks; {} where the tokenizer
    joins a pair. Raises CheckpointError where a pair ends in the padding token, behind which the
    classifier does not look."""
    parts = pair_template.find(d, tokenizer)
    if parts is None:
        ids = tokenizer("a", "b")["input_ids"]
    else:
        ids = tokenizer("a".join(parts), add_special_tokens=False)["input_ids"]
        (first, *_) = tokenizer("a".join(parts))["input_ids"]
        if d.section.template is not None and first != ids[0]:
            say(
                f"load: warning: the tokenizer puts {tokenizer.decode([first])!r} before a text, "
                "and not before model.template; write it into the template if the model was "
                "trained with it"
            )
    if ids[-1] == d.config.pad_token_id:
        raise CheckpointError(
            f"a query and its document end in the padding token ({ids[-1]}), and the score is read "
            "from the last token of another id",
            where=f"{model_folder(d.root)}: pad_token",
            accepted="a padding token that ends no text",
            fix="Set pad_token of tokenizer_config.json and pad_token_id of config.json to another "
            "token.",
        )
    return {} if parts is None else {"template": list(parts)}


def _answers(d: Described, tokenizer: Any, max_length: int) -> dict[str, Any]:
    """Build section `answers` of the contract for question answering. Raises CheckpointError for a
    tokenizer whose contexts stand first, and RecipeError for windows that share all their
    tokens."""
    if tokenizer.padding_side != "right":
        raise CheckpointError(
            f"the tokenizer pads on the {tokenizer.padding_side}, where transformers puts the "
            "context before the question",
            where=f"{d.files / 'tokenizer_config.json'}: padding_side",
            accepted="right",
            fix="Use the tokenizer that the model was trained with; its order is not covered here "
            "if it pads on the left.",
        )
    if int(d.config.num_labels) != len(d.task.joined):
        raise CheckpointError(
            f"the model has {d.config.num_labels} labels; question answering needs one for the "
            "start and one for the end",
            where="config.json: id2label (num_labels)",
            accepted=f"{len(d.task.joined)} labels, or no id2label",
        )
    settings = (d.section.answers or SpanAnswers()).settings(max_length)
    room = max_length - int(tokenizer.num_special_tokens_to_add(pair=True))
    if settings.doc_stride >= room:
        raise RecipeError(
            f"windows of {max_length} tokens cannot share {settings.doc_stride}",
            where="model.answers.doc_stride",
            accepted=f"below {room}, and less by the tokens of the questions",
        )
    return asdict(settings)


def _zero_shot(d: Described) -> dict[str, Any]:
    """Build section `zero_shot` of the contract. Raises CheckpointError for a model without a label
    of entailment."""
    names = {int(i): str(name) for i, name in d.config.id2label.items()}
    numbers = [int(i) for name, i in d.config.label2id.items() if name.lower().startswith(ENTAILS)]
    if not numbers or not names.get(numbers[0], "").lower().startswith(ENTAILS):
        raise CheckpointError(
            f"none of the labels {', '.join(names.values())} begins with {ENTAILS!r} in both "
            "label2id and id2label",
            where="config.json: label2id",
            accepted="a model of natural language inference, whose labels are e.g. contradiction, "
            "neutral, entailment",
            fix="Name its labels so, in the order of its outputs.",
        )
    assert d.section.zero_shot is not None  # the recipe was checked
    settings = d.section.zero_shot
    return {
        "candidate_labels": list(settings.candidate_labels),
        "hypothesis_template": settings.template(d.task),
        "multi_label": settings.multi_label,
        "entailment": numbers[0],
    }


def _mask(tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Return for the contract the mask token for fill-mask, {"mask_id", "mask_token"}, of
    transformers' tokenizer."""
    if tokenizer.mask_token is None:
        raise CheckpointError(
            "the tokenizer has no mask token, so nothing in a text can be filled in",
            where=str(folder / "tokenizer_config.json"),
            fix='Set "mask_token" there to the mask token that the model was trained with.',
        )
    return {"mask_id": int(tokenizer.mask_token_id), "mask_token": str(tokenizer.mask_token)}


def _embedding(d: Described) -> dict[str, Any]:
    """Return the contract's {section: value} of a sentence embedding: pooling and normalize from
    the recipe, else from the folder, else mean and true; embedding where a setting differs from its
    default."""
    section, reading = d.section, folder.read(d.root, d.section, int(d.config.hidden_size))
    chosen = tuple(section.pooling) if isinstance(section.pooling, list) else section.pooling
    if chosen is not None and reading.pooling not in (None, chosen):
        say(f"load: the recipe's pooling {chosen} replaces the checkpoint's {reading.pooling}")
    modes = [1 if isinstance(p, str) else len(p) for p in (chosen, reading.pooling) if p]
    if len(set(modes)) > 1 and any(layer.shapes for layer in reading.settings.layers):
        raise RecipeError(
            f"{chosen} makes another width than {reading.pooling}, which the folder's layers take",
            where="model.pooling",
            accepted=f"{modes[1]} pooling method(s)",
        )
    normalize = reading.normalize if section.normalize is None else section.normalize
    values: dict[str, Any] = {
        "pooling": chosen or reading.pooling or "mean",
        "normalize": True if normalize is None else normalize,
    }
    if reading.settings != EmbeddingSettings():
        values["embedding"] = asdict(reading.settings)
    return values


def _vector(d: Described) -> dict[str, Any]:
    """Return the contract's {section: value} of the side of texts of a pair, whose vector is that
    of the last token, not of unit length. Raises RecipeError for another pooling."""
    if d.section.pooling is not None:
        raise RecipeError(
            f"{d.section.pooling} was found, and the vector of {d.config.model_type} is pooled by "
            "the model itself",
            where="model.pooling",
            accepted="no pooling",
        )
    return {"pooling": "lasttoken", "normalize": bool(d.section.normalize)}


def _sparse(d: Described) -> dict[str, Any]:
    """Return the contract's {section: value} of a sparse embedding: sparse, and embedding with
    prompts and similarity."""
    reading = folder.read(d.root, d.section, int(d.config.hidden_size))
    assert reading.sparse is not None
    return {"sparse": asdict(reading.sparse), "embedding": asdict(reading.settings)}


def _write_embedding(d: Described, out: Path, tokenizer: Any) -> None:
    """Write the parameters of a sentence embedding's layers to `out`, and put the lower-casing that
    sentence-transformers adds into tokenizer.json there. tokenizer: transformers'"""
    reading = folder.read(d.root, d.section, int(d.config.hidden_size))
    if reading.values is not None:
        np.save(out / folder.LAYERS, reading.values, allow_pickle=False)
    cased = any(tokenizer(t)["input_ids"] != tokenizer(t.lower())["input_ids"] for t in SENTENCES)
    if reading.lower_case and cased:
        file = out / "tokenizer.json"
        document = json.loads(file.read_text(encoding="utf-8"))
        steps = [{"type": "Lowercase"}, *filter(None, [document.get("normalizer")])]
        document["normalizer"] = {"type": "Sequence", "normalizers": steps}
        file.write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")


TEXTS = Preparation(
    noun="text model",
    first="input_ids",
    convert=convert,
    sections=sections,
    inputs=inputs,
    widths=widths,
)
