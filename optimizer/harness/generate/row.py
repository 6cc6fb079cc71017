"""One prompt while it is being answered: from scores to the next token, its text, and the end.

Law (tested): a row's tokens depend on its scores, its options and its number alone, never on what
runs beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..contract import Contract
from ..errors import InputError
from ..inputs.batch import Array
from .grammar import Follower, Grammar
from .options import Options, Sampling
from .sampling import choose
from .text import Detokenizer, StopFilter


@dataclass(frozen=True)
class Piece:
    """One token of one prompt's answer. row: number of the prompt. text: what the token let be
    given out, perhaps "". finish: null but for the last piece of a row, see Completion."""

    row: int
    token: int
    text: str
    finish: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Rules:
    """How the tokens of a request are chosen, and what ends its rows. grammar: that its texts are
    held to."""

    options: Options
    sampling: Sampling
    tokenizer: Any
    context: int
    ends: frozenset[int]
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    grammar: Grammar | None = None

    @classmethod
    def of(cls, contract: Contract, tokenizer: Any, options: Options) -> Rules:
        """Raises InputError for a stop string that would never be found."""
        spec = contract.decoder
        return cls(
            options,
            options.sampling(spec.defaults),
            tokenizer,
            spec.context,
            frozenset() if options.ignore_eos else frozenset(spec.eos_ids),
            _stop_tokens(tokenizer, options.stop),
        )


@dataclass
class Row:
    """See the module. room: tokens that may still follow. seen: ids of the prompt and after it."""

    rules: Rules
    number: int
    room: int
    seen: set[int]
    text: Detokenizer
    stops: StopFilter
    random: np.random.Generator
    follower: Follower | None = None
    finish: str | None = None

    @classmethod
    def begun(cls, rules: Rules, prompt: Sequence[int], number: int, drawn: int) -> Row:
        """number: by which its pieces name it. drawn: what its random numbers follow from, with
        the seed."""
        return cls(
            rules,
            number,
            min(rules.options.max_new_tokens, rules.context - len(prompt)),
            set(prompt),
            Detokenizer(rules.tokenizer, prompt),
            StopFilter(rules.options.stop),
            np.random.default_rng([rules.options.seed, drawn]),
            None if rules.grammar is None else rules.grammar.begin(),
        )

    def add(self, scores: Array) -> Piece:
        """Choose the next token by scores (vocabulary,) and say what it brings."""
        rules = self.rules
        if self.follower is not None:
            scores = self.follower.allowed(scores)
        token = choose(scores, self.seen, rules.sampling, self.random)
        if self.follower is not None:
            self.follower.add(token)
        self.seen.add(token)
        self.room -= 1
        stop: str | None = None
        if token in rules.ends:
            self.finish, text = "eos", self.stops.add(self.text.rest())
        elif token in rules.stop_tokens:
            self.finish, stop = "stop", rules.stop_tokens[token]
            text = self.stops.add(self.text.rest())
        else:
            text = self.stops.add(self.text.add(token))
            if self.room == 0 and self.stops.matched is None:
                self.finish = "length"
                text += self.stops.add(self.text.rest())
        if self.stops.matched is not None:
            self.finish, stop = "stop", self.stops.matched
        if self.finish is not None:
            text += self.stops.rest()
        return Piece(self.number, token, text, self.finish, stop)


def _stop_tokens(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """Stop strings that are special tokens: those print nothing, so they are known by their id.

    Raises InputError for one that has such a token among others: it would never be found.
    """
    stops_by_token = {}
    for stop in stops:
        whole = tokenizer.token_to_id(stop)
        if whole is not None and not tokenizer.decode([whole]):
            stops_by_token[whole] = stop
            continue
        encoded = tokenizer.encode(stop, add_special_tokens=False)
        pairs = zip(encoded.ids, encoded.tokens, strict=True)
        silent = [token for i, token in pairs if not tokenizer.decode([i])]
        if silent:
            raise InputError(
                f"{stop!r} has the special token {silent[0]}, which prints nothing",
                where="stop",
                accepted=f"text, or {silent[0]} by itself",
            )
    return stops_by_token
