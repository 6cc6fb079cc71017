"""Decode token ids to text incrementally: whole characters only, without stop strings.

Law (tested): the pieces joined are the decoded text, independent of token boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "�"  # replacement for bytes that are not, or not yet, a character
CONTEXT = 8  # prompt tokens decoded along, because some decoders strip the first space


class Detokenizer:
    """Converter of one generated text's token ids to text, token by token.

    A character of several tokens is returned with its last token. Each step decodes only the newest
    tokens, so that the cost per token is constant. Special tokens print nothing.
    prompt: ids before the generated tokens.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._written = self._decode(0)  # text of the window that was returned
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """Return the text that this generated token completes, perhaps ""."""
        self._ids.append(token)
        text = self._decode(0)
        if len(text) <= len(self._written) or text.endswith(BROKEN):
            return ""
        new = text[len(self._written) :]
        self._ids = self._ids[self._read :]
        self._written, self._read = self._decode(0), len(self._ids)
        return new

    def flush(self) -> str:
        """Return the text of an incomplete character at the end of the generated text, perhaps "";
        called once."""
        return self._decode(0)[len(self._written) :]

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:], skip_special_tokens=True))


class StopFilter:
    """Withhold text that may become a stop string, and end the text before the first stop string.

    The first stop string is the one completed earliest, the longest if several end there, so that
    the result does not depend on token boundaries. `matched` is that stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._pending = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """Add generated text; returns the part that may be emitted now, because no stop string can
        begin in it, and "" after a stop string was found."""
        if self.matched is not None:
            return ""
        self._pending += text
        ends = [(self._pending.find(s) + len(s), s) for s in self._stops if s in self._pending]
        if ends:
            end, self.matched = min(ends, key=lambda e: e[0])  # the longest came first
            out, self._pending = self._pending[: end - len(self.matched)], ""
            return out
        keep = max((_overlap(self._pending, s) for s in self._stops), default=0)
        out, self._pending = (
            self._pending[: len(self._pending) - keep],
            self._pending[len(self._pending) - keep :],
        )
        return out

    def flush(self) -> str:
        """Return the generated text withheld because a stop string could have begun in it; called
        once, at the end."""
        out, self._pending = self._pending, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of the generated `text` that is a prefix of
    `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
