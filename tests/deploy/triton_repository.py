"""Parse a config.pbtxt for the tests of a Triton repository."""

from __future__ import annotations

import re
from typing import Any

TOKEN = re.compile(r'"[^"]*"|[\w-]+|[{}\[\]:,]')


def read(text: str) -> dict[str, list[Any]]:
    """Parse a text protobuf into {field: values}. Raises AssertionError for other text."""
    assert not TOKEN.sub("", text).strip()
    tokens = TOKEN.findall(text)
    message = _message(tokens)
    assert not tokens
    return message


def _message(tokens: list[str]) -> dict[str, list[Any]]:
    fields: dict[str, list[Any]] = {}
    while tokens and tokens[0] != "}":
        values = fields.setdefault(tokens.pop(0), [])
        if tokens[0] == ":":
            tokens.pop(0)
        if tokens[0] != "[":
            values.append(_value(tokens))
            continue
        tokens.pop(0)
        while tokens[0] != "]":
            values.append(_value(tokens))
            if tokens[0] == ",":
                tokens.pop(0)
        tokens.pop(0)
    return fields


def _value(tokens: list[str]) -> Any:
    token = tokens.pop(0)
    if token != "{":
        assert token not in "}[]:,"
        return token.strip('"')
    message = _message(tokens)
    assert tokens.pop(0) == "}"
    return message
