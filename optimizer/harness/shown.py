r"""Escape text and remove secrets, before it goes to a terminal, a log or a shared file.

File names, recipe keys, labels and registry answers are untrusted. `escape_line` and `escape_lines`
escape, as JSON does, everything that a terminal or a CI runner acts on: control characters
(\u001b), bidirectional overrides (\u202e), commands of GitHub (::error::), Azure (##vso[) and
TeamCity (##teamcity[). `scrub` removes secrets. Messages go through both; answers of a model are
only escaped, because a text that looks like a password is still the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

JOINERS = "\u200c\u200d"
"""Joiners of characters in Persian, Hindi and emoji, which are harmless in a terminal."""
COMMAND = re.compile(r"^([ \t]*):(?=:[A-Za-z])", re.M)
BRACKET = re.compile(r"#(?=#[A-Za-z]*\[)")
BEGUN = re.compile(r"(?:^[ \t]*:{0,2}|#|##[A-Za-z]*)\Z", re.M)
"""End of a text that may become COMMAND or BRACKET with the next piece."""
SECRET = "***"
WORD = r"(?:[^\s\"\\<>]|\\[^\s])+"
"""Word without spaces, in a sentence or in JSON with its escapes."""
ADDRESS = re.compile(f"://{WORD}")
USER = re.compile(r"(.*)@(?!sha256:)", re.S)
PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"AGE-SECRET-KEY-[0-9A-Z]{4,}", re.I), f"AGE-SECRET-KEY-{SECRET}"),
    (
        re.compile(
            r"(-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----)(?:\\.|[^\"])*?"
            r"(?:-----END [A-Z ]{0,40}-----|(?=\")|\Z)",
            re.S,
        ),
        rf"\1{SECRET}",
    ),
    (
        re.compile(
            rf"(\bauthorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:(?:basic|bearer)\s+)?){WORD}", re.I
        ),
        rf"\1{SECRET}",
    ),
    (
        re.compile(
            r"([?&;](?:[a-z0-9-]*(?:signature|credential|token|secret|password)|api_?key|sig"
            r"|accountkey|sharedaccesssignature)=)[^&;\s\"\\]+",
            re.I,
        ),
        rf"\1{SECRET}",
    ),
    (
        re.compile(r"\b(hf_|gh[opsur]_|github_pat_|glpat-|npm_|pypi-)[A-Za-z0-9_-]{16,}"),
        rf"\1{SECRET}",
    ),
)
"""Patterns of secrets and their replacements. No match crosses the end of a JSON string: a key
without its last line ends at the quote."""


def escape_line(text: str) -> str:
    """Escape a text that the harness prints, line ends too, so that a value cannot fake a line."""
    return _remove_commands("".join(map(_escaped, text)) if not text.isprintable() else text)


def escape_lines(text: str) -> str:
    """Escape a text that the harness prints, except line ends and tabs. JSON stays the same
    document."""
    parts = (
        part if part.isprintable() else "".join(c if c == "\t" else _escaped(c) for c in part)
        for part in text.split("\n")
    )
    return _remove_commands("\n".join(parts))


class Pieces:
    """Escapes a text that the harness prints in pieces, as `escape_lines` does for a whole one.

    The end of a piece that may begin a command is held back until the next piece or the end.
    """

    def __init__(self) -> None:
        self._tail = ""
        self._prefix = ""  # "." within a line, so that ^ does not match there

    def add(self, piece: str) -> str:
        """Add a piece of generated text; returns the escaped text that can be printed now, perhaps
        ""."""
        text = self._tail + piece
        command = BEGUN.search(self._prefix + text)
        end = command.start() - len(self._prefix) if command else len(text)
        self._tail = text[end:]
        return self._printed(text[:end])

    def end(self) -> str:
        """Return the escaped text that was held back from printing, perhaps ""."""
        tail, self._tail = self._tail, ""
        return self._printed(tail)

    def _printed(self, text: str) -> str:
        printed = escape_lines(self._prefix + text)[len(self._prefix) :]
        if text:
            self._prefix = "" if text.endswith("\n") else "."
        return printed


def scrub(text: str) -> str:
    """Remove secrets from a text to be printed or logged: return it with passwords in addresses,
    keys and tokens as ***. JSON stays JSON."""
    for pattern, instead in PATTERNS:
        text = pattern.sub(instead, text)
    return ADDRESS.sub(_remove_users, text)


def scrub_document(document: Any) -> Any:
    """Return a JSON document, to be printed or stored, with `scrub` applied to every text, keys
    included."""
    return _each_text(document, scrub)


def has_credentials(address: str) -> bool:
    """Return True for an address, not to be printed, with a user or a password:
    scheme://user:password@host."""
    return any(_remove_users(match) != match[0] for match in ADDRESS.finditer(address))


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(k, change): _each_text(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_each_text(v, change) for v in value]
    return value


def _remove_users(match: re.Match[str]) -> str:
    """Remove the user from each address in a word to be printed. A path may hold an @; a user may
    hold a slash only in the password."""
    first, *parts = match[0].split("://")
    for i, part in enumerate(parts):
        user = USER.match(part)
        before, slash, _ = user[1].partition("/") if user else ("", "", "")
        _, colon, password = before.partition(":")
        if user and (not slash or (colon and not password.isdigit())):
            parts[i] = f"{SECRET}@{part[user.end() :]}"
    return "://".join([first, *parts])


def _remove_commands(text: str) -> str:
    return BRACKET.sub(r"\\u0023", COMMAND.sub(r"\1\\u003a", text))


def _escaped(character: str) -> str:
    """Escape a printed character as JSON does, so that JSON stays the same document."""
    if character.isprintable() or character in JOINERS:
        return character
    return json.dumps(character)[1:-1].replace("\x7f", r"\u007f")
