"""fill-mask: the likeliest tokens in place of each mask token of a text.

The model reads the mask token as a word of its own, e.g. "what a [MASK] film".
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.kind import Encoded
from ..inputs.text import TEXT
from .task import Task, clear_padding
from .text_classification import softmax

if TYPE_CHECKING:
    from ..contract import Contract

BEST = 5  # tokens per mask, as transformers' pipeline gives
SHARE = 0.15  # of a text's tokens that are masked to judge a model, as in training


def check(contract: Contract, encoded: Encoded) -> tuple[str, str]:
    """Check an input of fill-mask: (problem, remedy) of a text without a mask among the tokens that
    the model reads.

    ("", "") for other texts.
    """
    if contract.text.mask in encoded.encoding.ids:
        return "", ""
    where = f" among its first {encoded.size} tokens, which are read" if encoded.cut else ""
    token = contract.text.mask_token
    return f"the text has no {token}{where}", f"Put {token} where a word is to be filled in."


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of fill-mask, {"masks"} per text: for each mask the BEST tokens, the
    likeliest first, each {"score", "token", "token_str", "sequence"}.

    sequence: the text with the token in place of the mask; of several masks the others stay, and so
        do special tokens.
    """
    return [
        {"masks": _filled(contract, list(e.ids), row, batch.encoder)}
        for e, row in zip(batch.encodings, values, strict=True)
    ]


def _filled(
    contract: Contract, ids: list[int], logits: Array, tokenizer: Any
) -> list[list[dict[str, Any]]]:
    """Fill masks: return the BEST tokens for each mask of one text, in the form of `answers`.

    ids: token ids of the text
    logits: (sequence, vocabulary)
    """
    places = [i for i, token in enumerate(ids) if token == contract.text.mask]
    masks = []
    for place in places:
        scores = softmax(logits[place])
        best = np.argsort(-scores, kind="stable")[:BEST]
        row = []
        for token in map(int, best):
            whole = [token if i == place else t for i, t in enumerate(ids)]
            whole = [t for t in whole if t != contract.text.pad_id]
            text = tokenizer.decode(whole, skip_special_tokens=len(places) == 1)
            word = tokenizer.decode([token], skip_special_tokens=False)
            row.append(
                {
                    "score": float(scores[token]),
                    "token": token,
                    "token_str": word,
                    "sequence": text,
                }
            )
        masks.append(row)
    return masks


def ask(contract: Contract, text: str) -> str:
    """Make an input of fill-mask: a text of a data set with its second word replaced by the mask
    token."""
    token = str(contract.text.mask_token)
    words = text.split() or [""]
    words[min(1, len(words) - 1)] = token
    return text if token in text else " ".join(words)


def draw_positions(encoding: Any) -> Array:
    """Choose where to mask a text: the positions of SHARE of a text's tokens, one or more and none
    of them special, drawn by the digest of the ids."""
    digest = hashlib.sha256(np.array(encoding.ids, np.int64).tobytes()).digest()
    own = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
    count = min(len(own), max(1, round(SHARE * len(own))))
    return np.random.default_rng(list(digest)).choice(own, count, replace=False)


def mask_tokens(contract: Contract, batch: Batch) -> tuple[Batch, Array]:
    """Return a copy of a batch of texts with masks at the positions that `draw_positions` draws in
    each text, and where they are, (batch, sequence) bool."""
    places = np.zeros(batch["input_ids"].shape, bool)
    for row, encoding in zip(places, batch.encodings, strict=True):
        row[draw_positions(encoding)] = True
    ids = np.where(places, contract.text.mask, batch["input_ids"])
    arrays = {**batch, "input_ids": ids.astype(batch["input_ids"].dtype)}
    return Batch(arrays, batch.inputs, batch.encodings, batch.real, batch.encoder), places


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of fill-mask in one line for a person: the likeliest tokens of each mask."""
    masks = ([f"{t['token_str']} {t['score']:.4f}" for t in row] for row in answer["masks"])
    return " | ".join("  ".join(row) for row in masks)


TASK = Task(
    name="fill-mask",
    inputs=TEXT,
    output="logits",
    axes=("batch", "sequence", "vocabulary"),
    metrics={"log_likelihood": (), "agreement": ()},
    decode=clear_padding,
    answers=answers,
    line=line,
    arrays=("token_type_ids",),
    check=check,
    ask=ask,
    model="transformers:AutoModelForMaskedLM",
    heads=("ForMaskedLM",),
    not_in_browser="the page has no code that turns tokens into text",
)
