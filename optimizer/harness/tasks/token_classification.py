"""token-classification: one label per word, and entities of adjacent words.

A word has the label of its first token, as in training; its other tokens are ignored. "B-x" starts
an entity of kind x, "I-x" continues one, a label without a prefix counts as "I-", and "O" is
outside of entities.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..inputs.batch import Array, Batch
from ..inputs.text import TEXT
from .task import Task
from .text_classification import softmax

if TYPE_CHECKING:
    from ..contract import Contract

OUTSIDE = "O"


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """Return logits (batch, sequence, labels), zero where padded."""
    del contract
    return logits * mask[..., None]


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return {"words", "entities"} per text.

    Each item is {"label", "score", "text", "start", "end"}, with offsets in characters. An entity's
    score is the mean of its words' scores. Words lost to truncation are not in the answer.
    """
    rows = []
    for text, encoding, row in zip(batch.inputs, batch.encodings, values, strict=True):
        tagged = words(contract, text, encoding, row)
        rows.append({"words": tagged, "entities": entities(text, tagged)})
    return rows


def words(contract: Contract, text: str, encoding: Any, logits: Array) -> list[dict[str, Any]]:
    """Return {"label", "score", "text", "start", "end"} per word of a text, by its first token.

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


def _place(text: str, start: int, end: int) -> dict[str, Any]:
    """Return {"text", "start", "end"} of a span without the leading white space of tokens."""
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return {"text": text[start:end], "start": start, "end": end}


def entities(text: str, tagged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return entities, with the keys of `words`: joined words of one kind, see the module."""
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


def line(answer: Mapping[str, Any]) -> str:
    return "  ".join(f"{e['text']} [{e['label']}]" for e in answer["entities"]) or "-"


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
    model="transformers:AutoModelForTokenClassification",
    heads=("ForTokenClassification",),
    not_in_browser="answers name places in the text, which the tokenizer there does not give",
)
