"""Format results as lines for a person or as JSON lines, and summarize them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .shown import escape_line, escape_lines
from .tasks.answering import Answered
from .tasks.task import Task


@dataclass(frozen=True)
class Summary:
    """Totals that the harness prints after one `predict` call.

    texts: number of inputs, answered or failed.
    cut: number of truncated inputs.
    longest: truncated input with the most tokens.
    failed: number of inputs with an error.
    first: first result with an error.
    noun: name of one input.
    unknown: first result whose text has unknown tokens.
    unknowns: number of such texts.
    """

    texts: int = 0
    cut: int = 0
    longest: Answered | None = None
    failed: int = 0
    first: Answered | None = None
    noun: str = "text"
    unknown: Answered | None = None
    unknowns: int = 0

    @property
    def exit_code(self) -> int:
        """Exit code of a command that answered several inputs: that of the first error, or 0."""
        return 0 if self.first is None or self.first.error is None else self.first.error.exit_code

    @property
    def lines(self) -> list[str]:
        """Lines of `predict` for standard error; none if every input was answered whole."""
        lines = []
        if self.longest is not None:
            lines.append(
                f"{self.cut:,} of {self.texts:,} {self.noun}s were truncated to "
                f"{self.longest.kept} tokens; the longest, {self.longest.where}, has "
                f"{self.longest.tokens:,} tokens"
            )
        if self.unknown is not None:
            lines.append(
                f"warning: {self.unknowns:,} of {self.texts:,} {self.noun}s have tokens that the "
                f"tokenizer does not know, which the model cannot tell apart; the first, "
                f"{self.unknown.where}: {self.unknown.unknown} of {self.unknown.kept} tokens"
            )
        if self.first is not None:
            lines.append(
                f"{self.failed:,} of {self.texts:,} {self.noun}s failed; "
                f"the first: {self.first.error}"
            )
        return lines


def write(
    answers: Iterable[Answered], emit: Callable[[Answered], None], noun: str = "text"
) -> Summary:
    """Emit each result of `predict` as it arrives, and return the totals."""
    texts = cut = failed = unknowns = 0
    longest: Answered | None = None
    unknown: Answered | None = None
    first: Answered | None = None
    for answered in answers:
        emit(answered)
        texts += 1
        if answered.truncated:
            cut += 1
            if longest is None or (answered.tokens or 0) > (longest.tokens or 0):
                longest = answered
        if answered.unknown:
            unknowns += 1
            unknown = unknown or answered
        if answered.error is not None:
            failed += 1
            first = first or answered
    return Summary(texts, cut, longest, failed, first, noun, unknown, unknowns)


def format_json(answered: Answered, engine: str) -> str:
    """Format a result of `predict` as one line, a JSON object in ASCII. engine: target of the
    engine that answered.

    The object is the task's answer with "engine", and, except for generation, "tokens" (of the text
    before truncation) and "truncated"; or {"error", "where", "found", "accepted", "fix"}.
    """
    if answered.answer is None:
        return escape_lines(json.dumps({} if answered.error is None else answered.error.as_dict()))
    more: dict[str, Any] = {"engine": engine}
    if answered.tokens is not None:
        more |= {"tokens": answered.tokens, "truncated": answered.truncated}
    return escape_lines(json.dumps({**answered.answer, **more}))


def format_text(answered: Answered, task: Task) -> str:
    """Format a result of `predict` for a person, on one line; a generated text keeps its lines.

    Control characters are escaped (shown.py); --json prints every character.
    """
    if answered.answer is None:
        return escape_line(f"error: {answered.error}")
    line = task.line(answered.answer)
    return escape_lines(line) if task.multiline else escape_line(line.replace("\n", " "))
