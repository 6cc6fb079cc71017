"""Answers as lines: one each, in place, for a person or as JSON; and what is said at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..shown import many_lines, one_line
from .answering import Answered
from .task import Task


@dataclass(frozen=True)
class Summary:
    """texts: how many inputs were answered or refused; noun: what one is called. cut: those longer
    than the model reads; longest: the one with the most tokens. failed: those with an error in
    place of an answer; first: the first of them."""

    texts: int = 0
    cut: int = 0
    longest: Answered | None = None
    failed: int = 0
    first: Answered | None = None
    noun: str = "text"

    @property
    def exit_code(self) -> int:
        """0, or that of the first error: some line has no answer."""
        return 0 if self.first is None or self.first.error is None else self.first.error.exit_code

    @property
    def lines(self) -> list[str]:
        """What to say on standard error; nothing when every text was read whole and answered."""
        lines = []
        if self.longest is not None:
            lines.append(
                f"{self.cut:,} of {self.texts:,} {self.noun}s were cut to the {self.longest.kept} "
                f"tokens that the model reads; the longest, {self.longest.where}, has "
                f"{self.longest.tokens:,}"
            )
        if self.first is not None:
            lines.append(
                f"{self.failed:,} of {self.texts:,} {self.noun}s have no answer but an error "
                f"in its place; the first: {self.first.error}"
            )
        return lines


def write(
    answers: Iterable[Answered], emit: Callable[[Answered], None], noun: str = "text"
) -> Summary:
    """Emit each answer as it comes, and sum up."""
    texts = cut = failed = 0
    longest: Answered | None = None
    first: Answered | None = None
    for answered in answers:
        emit(answered)
        texts += 1
        if answered.truncated:
            cut += 1
            if longest is None or (answered.tokens or 0) > (longest.tokens or 0):
                longest = answered
        if answered.error is not None:
            failed += 1
            first = first or answered
    return Summary(texts, cut, longest, failed, first, noun)


def json_line(answered: Answered, engine: str) -> str:
    """One JSON object in ASCII, so that nothing in it ends a line anywhere.

    The task's answer with "engine" and, where the model reads a text in one run, "tokens" (how
    many the text has) and "truncated"; or {"error", "where", "found", "accepted", "fix"}.
    """
    if answered.answer is None:
        return many_lines(json.dumps({} if answered.error is None else answered.error.as_dict()))
    more: dict[str, Any] = {"engine": engine}
    if answered.tokens is not None:
        more |= {"tokens": answered.tokens, "truncated": answered.truncated}
    return many_lines(json.dumps({**answered.answer, **more}))


def text_line(answered: Answered, task: Task) -> str:
    """One answer for a person, on one line; a generated text with its lines. Nothing in it is
    for a terminal to act on: see shown.py. With --json it is to the character."""
    if answered.answer is None:
        return one_line(f"error: {answered.error}")
    line = task.line(answered.answer)
    return many_lines(line) if task.generates else one_line(line.replace("\n", " "))
