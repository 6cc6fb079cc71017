"""Read the right answers to a question from a column, and score an answer by them as SQuAD does.

exact match and F1 of words after normalization (lower case, without punctuation, articles and
further white space), each the best over the right answers. A question without a right answer needs
an empty one. Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822), and their
evaluate-v2.0.py.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from optimizer.foundation.errors import DataError

Score = Callable[[str, Sequence[str]], float]
"""(answer, right answers) -> 0 to 1."""
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)
ACCEPTED = 'a text, a list of texts, {"text": [...]} or a list of {"text": "..."}; [] for no answer'


def read_answers(written: Any, where: str) -> tuple[str, ...]:
    """Read from a data set's column the right answers to a question; () where it has none.

    written: the value; a text that begins with { or [ is JSON, because csv files hold lists and
        objects as text
    where: the row, for messages

    Raises DataError for any other value.
    """
    value = written
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            value = json.loads(value)
        except ValueError as e:
            raise DataError(
                f"{value[:80]!r} is not JSON ({e})",
                where=where,
                accepted=ACCEPTED,
                fix="Write the column with json.dumps.",
            ) from None
    if isinstance(value, dict):
        value = value.get("text")
    if isinstance(value, str):
        value = [value] if value.strip() else []
    texts = value
    if isinstance(value, list):
        texts = [one.get("text") if isinstance(one, dict) else one for one in value]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{str(written)[:80]!r} was found", where=where, accepted=ACCEPTED)
    return tuple(text for text in texts if text.strip())


def normalize(text: str) -> str:
    """Lower the case of an answer and remove punctuation, articles and further white space, as
    SQuAD does."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Score an answer to a data set's question: 1.0 if it equals one of `right` after
    normalization, else 0.0."""
    return float(normalize(answer) in map(normalize, select_usable(right)))


def f1(answer: str, right: Sequence[str]) -> float:
    """Score an answer to a data set's question: the best F1 over words between it and one of
    `right`, after normalization."""
    return max(
        _f1(normalize(answer).split(), normalize(one).split()) for one in select_usable(right)
    )


def select_usable(right: Sequence[str]) -> Sequence[str]:
    """Return the right answers of a data set's row that are not empty after normalization; [""] if
    there are none."""
    return [one for one in right if normalize(one)] or [""]


def _f1(answer: Sequence[str], right: Sequence[str]) -> float:
    if not answer or not right:
        return float(answer == right)
    common = (Counter(answer) & Counter(right)).total()
    return 2 * common / (len(answer) + len(right))


SCORES: dict[str, Score] = {"exact_match": exact_match, "f1": f1}
"""{metric: score of one answer}."""
