"""Token ids to text as they come: whole characters only, and nothing of a stop string.

Law (tested): the pieces put together are the text, however the tokens cut it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "�"  # what a decoder prints for bytes that are no character, or not yet one
CONTEXT = 8  # tokens before the answer that are decoded along: some decoders strip a first space


class Detokenizer:
    """Text of one row, token by token.

    A character of several tokens is given out with its last. Only the newest tokens are decoded
    again at each step, so a long text costs no more per token than a short one.
    prompt: ids before the answer. Special tokens print nothing.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt[-CONTEXT:])
        self._written = self._decode(0)  # text of the window that is out
        self._read = len(self._ids)

    def add(self, token: int) -> str:
        """The text this token completes, perhaps none."""
        self._ids.append(token)
        text = self._decode(0)
        if len(text) <= len(self._written) or text.endswith(BROKEN):
            return ""
        new = text[len(self._written) :]
        self._ids = self._ids[self._read :]
        self._written, self._read = self._decode(0), len(self._ids)
        return new

    def rest(self) -> str:
        """What never became a character, as the decoder prints it; call once, at the end."""
        return self._decode(0)[len(self._written) :]

    def _decode(self, start: int) -> str:
        return str(self._tokenizer.decode(self._ids[start:], skip_special_tokens=True))


class StopFilter:
    """Holds back what may become a stop string, and ends the text before the first that does.

    The first is the one completed earliest, the longest if several end there, so that the cut
    does not depend on how tokens cut the text. `matched` names it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._pending = ""
        self.matched: str | None = None

    def add(self, text: str) -> str:
        """What may be given out now. Nothing more comes once a stop string was found."""
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

    def rest(self) -> str:
        """What was held back and has become no stop string; call once, at the end."""
        out, self._pending = self._pending, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
