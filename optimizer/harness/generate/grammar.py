"""Constrain generation to a JSON schema with llguidance.

llguidance reads the tokenizer file and returns one bit per token in about 30 µs. Forbidden tokens
get the score -inf before any other step of sampling.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import AnswerError, InputError, MachineError
from ..inputs.batch import Array

LONGEST = 64 << 10  # maximum characters of a schema
PACKAGE = "llguidance"
NO_SPACES = {"whitespace_flexible": False}  # otherwise endless spaces would be valid JSON


def is_installed() -> bool:
    """Return True if the package llguidance, for structured output, is installed."""
    return find_spec(PACKAGE) is not None


class SchemaError(AnswerError):
    """A schema of structured output that llguidance cannot follow at the current token."""


class Grammars:
    """Compiler of grammars for structured output for one tokenizer; its construction takes about a
    second.

    vocabulary: vocabulary size of the model, which may exceed the tokenizer's.
    end: id of the token that ends a text.
    Raises MachineError without llguidance.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end: int) -> None:
        if not is_installed():
            raise MachineError(f"{PACKAGE} is not installed", fix=f"pip install {PACKAGE}")
        import llguidance

        self._matcher, self._vocabulary = llguidance.LLMatcher, vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer.to_str(), n_vocab=vocabulary, eos_token=end
        )

    def compile_schema(self, schema: Mapping[str, Any], where: str) -> Grammar:
        """Return the Grammar of a JSON schema.

        Raises InputError naming `where` for an invalid, too large or unsupported schema. The
        message never quotes the schema.
        """
        text = json.dumps(schema)
        if len(text) > LONGEST:
            raise InputError(
                "the schema is too long", where=where, accepted=f"up to {LONGEST:,} characters"
            )
        try:
            grammar = self._matcher.grammar_from_json_schema(text, defaults=NO_SPACES)
            problem = self._matcher.validate_grammar(grammar, self._tokenizer)
        except ValueError:
            problem = "not read"
        if problem:
            raise InputError(
                "the schema is invalid or unsupported", where=where, accepted="a JSON schema"
            )
        checked = Grammar(self, grammar)
        try:  # a recursive schema fails only at the first token
            checked.begin().mask_scores(np.zeros(self._vocabulary, np.float32))
        except SchemaError as e:
            raise InputError(e.problem, where=where, accepted="a JSON schema") from None
        return checked

    def matcher(self, grammar: str) -> Any:
        """Make llguidance's matcher at the start of a grammar, which allows or forbids each next
        token."""
        return self._matcher(self._tokenizer, grammar)


class Grammar:
    """One compiled grammar of structured output (JSON schema, regular expression), for any number
    of texts."""

    def __init__(self, grammars: Grammars, text: str) -> None:
        self._grammars, self._text = grammars, text

    def begin(self) -> Follower:
        """Return the state of a new generated text at the start of the grammar."""
        return Follower(self._grammars.matcher(self._text))


class Follower:
    """State of one generated text in the grammar that its tokens must follow."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask_scores(self, scores: Array) -> Array:
        """Return next-token scores (vocabulary,) with -inf for forbidden tokens.

        Raises SchemaError if the grammar is too expensive to follow, or allows no token.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=scores.size, bitorder="little").astype(bool)
        if self._matcher.is_error() or not allowed.any():
            problem = "the schema is too expensive to follow, or allows no token here"
            raise SchemaError(problem, where="response_format")
        return np.where(allowed, scores, np.float32(-np.inf))

    def add(self, token: int) -> None:
        """Advance the state by the token that was generated."""
        self._matcher.consume_token(token)
