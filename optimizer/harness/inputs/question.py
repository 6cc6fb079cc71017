"""Tokenize questions with their contexts, a long context in overlapping windows.

    question + tokens 0 to n of the context
    question + tokens n - doc_stride to 2 n - doc_stride ...

as transformers' question-answering pipeline and run_qa.py: the context alone is cut
(truncation="only_second"), and each window shares doc_stride tokens with the one before it. A text
without a pair is a context without a question, for timing and comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..bounds import TEXT as READ_AT_MOST
from .kind import Encoded
from .text import TEXT, TextTokenizer, check_length, check_texts, tokenize

if TYPE_CHECKING:
    from ..contract import Contract

CONTEXT = 1  # number of the context among the sequences of an encoding


def encode(
    contract: Contract,
    tokenizer: TextTokenizer,
    questions: Sequence[str],
    contexts: Sequence[str | None] | None = None,
    length: int | None = None,
) -> list[Encoded]:
    """Tokenize each question with its context, in windows.

    A result is the first window; its `more` are the others. A context without a token, or with more
    than READ_AT_MOST characters, and a question that leaves no room for a window get a `problem`.

    contexts: context per question; None: the questions are contexts without a question
    length: tokens of the first window, which is then the only one; None: the contract's max_length,
        and all windows

    Raises InputError as text.encode does.
    """
    check_texts(questions, contexts)
    limit = check_length(contract, length)
    stride = contract.spans.doc_stride if length is None else 0
    rows = [
        ("", q) if c is None else (q, c)
        for q, c in zip(questions, contexts or [None] * len(questions), strict=True)
    ]
    special = int(tokenizer.num_special_tokens_to_add(True))
    ids_of_questions = tokenizer.ids([tokenizer.head(q, limit) for q, _ in rows])
    problems = [
        _find_problem(context, limit - special - len(ids), stride)
        for (_, context), ids in zip(rows, ids_of_questions, strict=True)
    ]
    heads = [
        (q, c if length is None else tokenizer.head(c, limit))
        for (q, c), (problem, _) in zip(rows, problems, strict=True)
        if not problem
    ]
    cut = tokenizer.cut_at(limit, stride, "only_second")
    encodings = iter(tokenize(cut, heads) if heads else ())
    unknown = tokenizer.unknown_id
    encoded = []
    for (_, context), (problem, fix) in zip(rows, problems, strict=True):
        if problem:
            encoded.append(Encoded(context, None, problem=problem, fix=fix))
            continue
        first = next(encodings)
        windows = [first, *(first.overflowing if length is None else ())]
        encoded.append(_encoded(context, windows, stride, unknown, bool(first.overflowing)))
    return encoded


def _find_problem(context: str, room: int, stride: int) -> tuple[str, str]:
    """Return (problem, remedy) of an input question and its context; ("", "") if they can be read.

    room: tokens that the question leaves for the context
    stride: tokens that two windows share
    """
    if len(context) > READ_AT_MOST:
        return (
            f"the context has {len(context):,} characters, and up to {READ_AT_MOST:,} are read",
            "Ask about a part of it.",
        )
    if room <= stride:
        return (
            f"the question leaves {max(room, 0)} tokens for a window of the context, and windows "
            f"share {stride}",
            "Shorten the question.",
        )
    return "", ""


def _encoded(
    context: str, windows: Sequence[Any], stride: int, unknown: int, overflows: bool
) -> Encoded:
    """Build the model's input of one question with its context.

    windows: the tokenizer's encodings of its windows
    unknown: id of the unknown token; -1 without one
    overflows: True if the first window does not hold all of the context
    """
    if CONTEXT not in windows[0].sequence_ids:
        return Encoded(
            context,
            windows[0],
            problem="the context has no token",
            fix="Give the text that answers the question.",
        )
    new = [_drop_shared_ids(window, stride if i else 0) for i, window in enumerate(windows)]
    rest = [
        Encoded(context, w, len(w.ids), unknown=ids.count(unknown))
        for w, ids in zip(windows, new, strict=True)
    ]
    own = len(windows[0].ids) - len(new[0])  # question and special tokens
    return replace(
        rest[0],
        cut=overflows and len(windows) == 1,
        unknown=windows[0].ids.count(unknown) + sum(one.unknown for one in rest[1:]),
        more=tuple(rest[1:]),
        whole=own + sum(map(len, new)),
    )


def _drop_shared_ids(window: Any, shared: int) -> list[int]:
    """Return the token ids of a window's context without the first `shared`, which the window
    before has too."""
    both = zip(window.ids, window.sequence_ids, strict=True)
    return [token for token, sequence in both if sequence == CONTEXT][shared:]


QUESTION = replace(
    TEXT,
    encode=encode,
    requested=("question", "context"),
    example='"who wrote it" --pair "Ada wrote it in 1843."',
)
