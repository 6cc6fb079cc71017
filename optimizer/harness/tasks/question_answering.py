"""question-answering: the span of a context that answers a question, with its place there.

The model scores each token as the start and as the end of the answer. As transformers' pipeline and
DrQA (Chen et al. 2017, arXiv:1704.00051) do, in each window of the context:

    start, end    softmax over the tokens of the context and the class token, which stands for "no
                  answer"
    spans         the product start[i] * end[j] for i <= j < i + max_answer_len, widened to words

An answer that several windows give has the sum of its scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.kind import Encoded
from ..inputs.question import CONTEXT, QUESTION
from .task import Task, clear_padding

if TYPE_CHECKING:
    from ..contract import Contract

COLUMNS = (("text_pair", "answers"),)
START, END = 0, 1  # places in the last axis of the logits


def check(contract: Contract, encoded: Encoded) -> tuple[str, str]:
    """Check an input of question answering: (problem, remedy) of a context without a question; ("",
    "") for others."""
    del contract
    if 0 in encoded.encoding.sequence_ids:
        return "", ""
    return (
        "the question has no token, or the context is missing",
        f"Give both: {' and '.join(QUESTION.requested)}.",
    )


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Answer a question: return {"spans", "null"} per window, for `merge`: its best spans, the best
    first, and the probability of no answer."""
    return [
        _window(contract, context, encoding, row)
        for context, encoding, row in zip(batch.inputs, batch.encodings, values, strict=True)
    ]


def _window(contract: Contract, context: str, encoding: Any, logits: Array) -> dict[str, Any]:
    """Return {"spans", "null"} of one window of a context, as `answers` does.

    logits: (sequence, 2), start and end
    """
    settings = contract.spans
    inside = np.array(encoding.sequence_ids) == CONTEXT
    none = _class_places(encoding)
    start, end = (_softmax(logits[: len(inside), i], inside | none) for i in (START, END))
    null = float(start[0] * end[0]) if none[:1].any() else 0.0
    start, end = np.where(inside, start, 0), np.where(inside, end, 0)
    # (tokens, lengths): every span by its start and its length less one
    spans = np.zeros((len(start), settings.max_answer_len), np.float32)
    for more in range(min(settings.max_answer_len, len(start))):
        spans[: len(start) - more, more] = start[: len(start) - more] * end[more:]
    best = []
    for at in np.argsort(-spans, axis=None, kind="stable")[: 2 * settings.top_k + 10]:
        first, more = divmod(int(at), settings.max_answer_len)
        if spans[first, more] > 0:
            low, high = _characters(encoding, first, first + more)
            score = float(spans[first, more])
            best.append({"score": score, "start": low, "end": high, "answer": context[low:high]})
    return {"spans": best, "null": null}


def _class_places(encoding: Any) -> Array:
    """Return, where a question has no answer, the mask of the class token, (tokens,) bool: the
    first token, if it is special."""
    ids = np.array(encoding.ids)
    return np.asarray((ids == ids[0]) & bool(encoding.special_tokens_mask[0]))


def _softmax(logits: Array, kept: Array) -> Array:
    """Compute probabilities of the tokens that an answer may contain, float32; 0 for the others."""
    powers = np.exp(np.where(kept, logits - logits[kept].max(), -np.inf))
    return np.asarray(powers / powers.sum(), np.float32)


def _characters(encoding: Any, first: int, last: int) -> tuple[int, int]:
    """Return the characters of the words from token `first` to token `last`; of the tokens
    themselves where the tokenizer has no words."""
    low, high = encoding.offsets[first][0], encoding.offsets[last][1]
    words = [encoding.token_to_word(token) for token in (first, last)]
    if None in words:
        return low, high
    places = [encoding.word_to_chars(word, CONTEXT) for word in words]
    return places[0][0], places[1][1]


def merge(contract: Contract, windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the windows' answers to a question: {"answer", "score", "start", "end"} of the best
    answer over all windows; with top_k also "answers", the best first. start and end are characters
    of the context.

    The answer is "" with start and end 0 if no window has a span, or, with
    handle_impossible_answer, if the lowest probability of no answer over the windows is above the
    score of every span.
    """
    settings = contract.spans
    by_text: dict[str, dict[str, Any]] = {}
    for span in (span for window in windows for span in window["spans"]):
        same = by_text.setdefault(span["answer"].lower(), {**span, "score": 0.0})
        same["score"] += span["score"]
    none = {"score": 0.0, "start": 0, "end": 0, "answer": ""}
    ordered = list(by_text.values())
    if settings.handle_impossible_answer:
        ordered.append({**none, "score": min(window["null"] for window in windows)})
    ordered = sorted(ordered, key=lambda one: -one["score"])[: settings.top_k] or [none]
    return {**ordered[0], **({"answers": ordered} if settings.top_k > 1 else {})}


def line(answer: Mapping[str, Any]) -> str:
    """Write the answer to a question in one line for a person: each span with its score."""
    listed = answer.get("answers", [answer])
    return "  ".join(f"{one['answer'] or '-'} {one['score']:.4f}" for one in listed)


TASK = Task(
    name="question-answering",
    inputs=QUESTION,
    output="logits",
    axes=("batch", "sequence", "ends"),
    metrics={"f1": COLUMNS, "exact_match": COLUMNS, "agreement": (("text_pair",),)},
    decode=clear_padding,
    answers=answers,
    merge=merge,
    line=line,
    arrays=("token_type_ids",),
    optional=("answers",),
    pairs_together=True,
    check=check,
    model="transformers:AutoModelForQuestionAnswering",
    joined=("start_logits", "end_logits"),
    heads=("ForQuestionAnswering",),
    not_in_browser="answers name places in the text, which the tokenizer there does not give",
)
