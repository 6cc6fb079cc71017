"""token-classification: one label per word, and entities of adjacent words.

A word has the label of its first token, as in training; its other tokens are ignored. "B-x" starts
an entity of kind x, "I-x" continues one, a label without a prefix counts as "I-", and "O" is
outside of entities.

A contract with `aggregation` answers as transformers' TokenClassificationPipeline with that
strategy, without "O":

    none       each token: {"entity", "score", "index", "word", "start", "end"}
    simple     adjacent tokens of one kind are an entity: {"entity_group", "score", "word", "start",
               "end"}
    first      as simple, of words: a word has the label of its first token
    average    the label with the highest mean score of its tokens
    max        the label of the token with the highest score
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.text import TEXT
from .task import Task
from .text_classification import softmax

if TYPE_CHECKING:
    from ..contract import Contract

OUTSIDE = "O"
NONE = "none"
OF_WORDS = ("first", "average", "max")  # strategies that give a word one label


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """Return the logits (batch, sequence, labels) with 0 at padding, as the task's output."""
    del contract
    return logits * mask[..., None]


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of token classification, {"words", "entities"} per text; with
    contract.aggregation only {"entities"}.

    Without aggregation each item is {"label", "score", "text", "start", "end"}, with offsets in
    characters. An entity's score is the mean of its words' scores. Words lost to truncation are not
    in the answer.
    """
    rows: list[dict[str, Any]] = []
    for text, encoding, row in zip(batch.inputs, batch.encodings, values, strict=True):
        if contract.aggregation is not None:
            joined = aggregate_entities(contract, batch.encoder, text, encoding, row)
            rows.append({"entities": joined})
            continue
        tagged = words(contract, text, encoding, row)
        rows.append({"words": tagged, "entities": join_entities(text, tagged)})
    return rows


def words(contract: Contract, text: str, encoding: Any, logits: Array) -> list[dict[str, Any]]:
    """Label the words of a text: {"label", "score", "text", "start", "end"} per word, by its first
    token.

    encoding: encoding of a text without a pair.
    logits: (sequence, labels).
    """
    labels = contract.labels or ()
    scores = softmax(logits)
    tagged: list[dict[str, Any]] = []
    previous = None
    for i, word in enumerate(encoding.word_ids):
        if word is None or encoding.special_tokens_mask[i] or encoding.sequence_ids[i] != 0:
            continue
        start, end = encoding.offsets[i]
        if word == previous:
            tagged[-1] |= _place(text, tagged[-1]["start"], end)
            continue
        previous = word
        best = int(scores[i].argmax())
        score = float(scores[i, best])
        tagged.append({"label": labels[best], "score": score, **_place(text, start, end)})
    return tagged


def word_labels(contract: Contract, text: str, encoding: Any, logits: Array, tokenizer: Any) -> Any:
    """Return {start of a word in characters: label} of a text.

    A word gets the label of its first token, or that of the contract's aggregation strategy.
    """
    if contract.aggregation in OF_WORDS:
        tagged = aggregate_words(contract, tokenizer, text, encoding, logits)
        return {_place(text, w["start"], w["end"])["start"]: w["entity"] for w in tagged}
    return {w["start"]: w["label"] for w in words(contract, text, encoding, logits)}


def _place(text: str, start: int, end: int) -> dict[str, Any]:
    """Return {"text", "start", "end"} of a labelled span, without the white space at its start,
    which byte-level tokens include."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return {"text": text[start:end], "start": start, "end": end}


def join_entities(text: str, tagged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join adjacent labelled words of one kind to entities, which have the keys of `words`.

    "B-" in a word's label starts a new entity, and "O" ends one.

    tagged: words of a text with their labels, as `words` returns them
    """
    groups: list[tuple[str, list[dict[str, Any]]]] = []
    previous = OUTSIDE
    for word in tagged:
        prefix, dash, kind = word["label"].partition("-")
        if not dash or prefix not in ("B", "I"):
            prefix, kind = "I", word["label"]
        if kind != OUTSIDE:
            if prefix == "B" or kind != previous:
                groups.append((kind, []))
            groups[-1][1].append(word)
        previous = kind
    return [
        {
            "label": kind,
            "score": sum(w["score"] for w in group) / len(group),
            **_place(text, group[0]["start"], group[-1]["end"]),
        }
        for kind, group in groups
    ]


def aggregate_entities(
    contract: Contract, tokenizer: Any, text: str, encoding: Any, logits: Array
) -> list[dict[str, Any]]:
    """Return the entities of a text in order, joined by contract.aggregation.

    encoding: encoding of a text without a pair
    logits: (sequence, labels)
    """
    if contract.aggregation in OF_WORDS:
        parts = aggregate_words(contract, tokenizer, text, encoding, logits)
    else:
        parts = [
            _label_tokens(contract, token["scores"]) | token
            for token in _tokens(tokenizer, text, encoding, softmax(logits))
        ]
    if contract.aggregation == NONE:
        names = ("entity", "score", "index", "word", "start", "end")
        return [{n: part[n] for n in names} for part in parts if part["entity"] != OUTSIDE]
    groups = [_group(tokenizer, members) for members in _split_adjacent(parts)]
    return [group for group in groups if group["entity_group"] != OUTSIDE]


def aggregate_words(
    contract: Contract, tokenizer: Any, text: str, encoding: Any, logits: Array
) -> list[dict[str, Any]]:
    """Return {"entity", "score", "word", "start", "end"} per labelled word.

    Its label follows from the labels of its tokens by contract.aggregation: first, average or max.
    """
    joined: list[list[dict[str, Any]]] = []
    for token in _tokens(tokenizer, text, encoding, softmax(logits)):
        if joined and token["is_subword"]:
            joined[-1].append(token)
        else:
            joined.append([token])
    return [_word(contract, tokenizer, tokens) for tokens in joined]


def _word(contract: Contract, tokenizer: Any, tokens: Sequence[dict[str, Any]]) -> dict[str, Any]:
    scores = [token["scores"] for token in tokens]
    choose = {
        "first": lambda: scores[0],
        "average": lambda: np.mean(np.stack(scores), axis=0),
        "max": lambda: max(scores, key=lambda one: one.max()),
    }
    return {
        **_label_tokens(contract, choose[str(contract.aggregation)]()),
        "word": _string(tokenizer, [token["word"] for token in tokens]),
        "start": tokens[0]["start"],
        "end": tokens[-1]["end"],
    }


def _label_tokens(contract: Contract, scores: Array) -> dict[str, Any]:
    best = int(scores.argmax())
    return {"entity": (contract.labels or ())[best], "score": float(scores[best])}


def _tokens(tokenizer: Any, text: str, encoding: Any, scores: Array) -> list[dict[str, Any]]:
    """Return the labelled tokens of a text that are not special.

    is_subword: True if a token continues a word. Without a mark of its own in the vocabulary (##),
        white space at its start tells, as in the pipeline.
    """
    marked = bool(getattr(tokenizer.model, "continuing_subword_prefix", None))
    tokens = []
    for i, number in enumerate(encoding.ids):
        if encoding.special_tokens_mask[i]:
            continue
        start, end = encoding.offsets[i]
        word, covered = tokenizer.id_to_token(number), text[start:end]
        subword = start > 0 and " " not in text[start - 1 : start + 1]
        subword = len(word) != len(covered) if marked else subword
        if number == tokenizer.unknown_id:
            word, subword = covered, False
        place = {"index": i, "word": word, "start": start, "end": end}
        tokens.append({**place, "scores": scores[i], "is_subword": subword})
    return tokens


def _split_adjacent(parts: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Group adjacent labelled tokens or words of one kind to entities; a label "B-" starts a new
    one."""
    groups: list[list[dict[str, Any]]] = []
    previous = None
    for part in parts:
        prefix, kind = part["entity"][:2], part["entity"]
        if prefix in ("B-", "I-"):
            kind = kind[2:]
        if kind == previous and prefix != "B-":
            groups[-1].append(part)
        else:
            groups.append([part])
        previous = kind
    return groups


def _group(tokenizer: Any, members: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "entity_group": members[0]["entity"].split("-", 1)[-1],
        "score": float(np.mean(np.array([m["score"] for m in members], np.float32))),
        "word": _string(tokenizer, [m["word"] for m in members]),
        "start": members[0]["start"],
        "end": members[-1]["end"],
    }


def _string(tokenizer: Any, tokens: list[str]) -> str:
    decoder = tokenizer.decoder
    return " ".join(tokens) if decoder is None else str(decoder.decode(tokens))


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer in one line for a person: each entity with its label."""
    named = (
        (e.get("text", e.get("word")), e.get("label") or e.get("entity_group") or e.get("entity"))
        for e in answer["entities"]
    )
    return "  ".join(f"{text} [{label}]" for text, label in named) or "-"


TASK = Task(
    name="token-classification",
    inputs=TEXT,
    output="logits",
    axes=("batch", "sequence", "labels"),
    metrics={"f1": (("tags",),), "accuracy": (("tags",),), "cosine": ()},
    decode=decode,
    answers=answers,
    line=line,
    arrays=("token_type_ids",),
    sections=("labels",),
    optional=("aggregation",),
    model="transformers:AutoModelForTokenClassification",
    heads=("ForTokenClassification",),
    not_in_browser="answers name places in the text, which the tokenizer there does not give",
)
