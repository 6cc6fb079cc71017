"""Texts that a JSON schema, or any other grammar, allows: llguidance says which tokens may follow.

It reads the tokenizer's own file and gives a bit for each token (some 30 µs); what it forbids is
ruled out before anything else chooses.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import AnswerError, InputError, MachineError
from ..inputs.batch import Array

LONGEST = 64 << 10  # characters of a schema
PACKAGE = "llguidance"
NO_SPACES = {"whitespace_flexible": False}  # an endless run of spaces would be JSON, too


def installed() -> bool:
    return find_spec(PACKAGE) is not None


class SchemaError(AnswerError):
    """A schema that cannot be followed where a text has come to."""


class Grammars:
    """What a tokenizer's texts may be held to. Takes a second to make. vocabulary: of the model,
    which may be larger. end: the token that ends a text. Raises MachineError without llguidance."""

    def __init__(self, tokenizer: Any, vocabulary: int, end: int) -> None:
        if not installed():
            raise MachineError(f"{PACKAGE} is not installed", fix=f"pip install {PACKAGE}")
        import llguidance

        self._matcher, self._vocabulary = llguidance.LLMatcher, vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=vocabulary, eos_token=end
        )

    def of_schema(self, schema: Mapping[str, Any], where: str) -> Grammar:
        """The JSON documents of a schema. Raises InputError naming `where` for one that is none,
        too large, or uses what is not supported; nothing of it is repeated."""
        text = json.dumps(schema)
        if len(text) > LONGEST:
            raise InputError("too long", where=where, accepted=f"up to {LONGEST:,} characters")
        try:
            grammar = self._matcher.grammar_from_json_schema(text, defaults=NO_SPACES)
            problem = self._matcher.validate_grammar(grammar, self._tokenizer)
        except ValueError:
            problem = "not read"
        if problem:
            raise InputError(
                "not a schema that can be followed", where=where, accepted="a JSON schema"
            )
        checked = Grammar(self, grammar)
        try:  # one that refers to itself is found out at the first token
            checked.begin().allowed(np.zeros(self._vocabulary, np.float32))
        except SchemaError as e:
            raise InputError(e.problem, where=where, accepted="a JSON schema") from None
        return checked

    def matcher(self, grammar: str) -> Any:
        """A new beginning of the grammar's texts."""
        return self._matcher(self._tokenizer, grammar)


class Grammar:
    """One grammar, for any number of texts."""

    def __init__(self, grammars: Grammars, text: str) -> None:
        self._grammars, self._text = grammars, text

    def begin(self) -> Follower:
        return Follower(self._grammars.matcher(self._text))


class Follower:
    """Where one text is in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, scores: Array) -> Array:
        """The scores (vocabulary,), -inf of what may not follow. Raises SchemaError where the
        grammar takes too much to follow, or nothing may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        may = np.unpackbits(bits, count=scores.size, bitorder="little").astype(bool)
        if self._matcher.is_error() or not may.any():
            problem = "the schema takes too much to follow, or allows nothing here"
            raise SchemaError(problem, where="response_format")
        return np.where(may, scores, np.float32(-np.inf))

    def add(self, token: int) -> None:
        """What follows."""
        self._matcher.consume_token(token)
