"""Settings of question answering: the section `answers` of a contract, with the names that
transformers' pipeline and run_qa.py give them."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import require


@dataclass(frozen=True)
class SpanSettings:
    """Section `answers` of a bundle's contract: settings of the answers to questions.

    doc_stride: tokens that two windows of a long context share
    max_answer_len: maximum tokens of an answer
    handle_impossible_answer: True where "" is an answer too, if it is likelier than all others
    top_k: number of answers
    """

    doc_stride: int
    max_answer_len: int
    handle_impossible_answer: bool
    top_k: int = 1

    def __post_init__(self) -> None:
        for name, least in (("doc_stride", 0), ("max_answer_len", 1), ("top_k", 1)):
            value = getattr(self, name)
            require(value >= least, f"answers.{name}", value, f"{least} or more")
