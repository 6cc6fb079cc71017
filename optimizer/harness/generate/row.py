"""State of one prompt during generation: from scores to the next token, its text and its end.

Law (tested): the tokens of a row depend on its scores, options and number only, not on other rows.
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
    """One generated token.

    row: number of the prompt.
    token: id of the token.
    text: text completed by the token, perhaps "".
    finish, stop: as in Completion, in the last piece of a row; otherwise None.
    """

    row: int
    token: int
    text: str
    finish: str | None = None
    stop: str | None = None


@dataclass(frozen=True)
class Rules:
    """Rules by which a request's tokens are sampled and its texts end.

    context: maximum tokens of a sequence.
    ends: token ids that end a text.
    stop_tokens: {id: stop string} of the stop strings that are special tokens.
    grammar: grammar that constrains the texts, or None.
    """

    options: Options
    sampling: Sampling
    tokenizer: Any
    context: int
    ends: frozenset[int]
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    grammar: Grammar | None = None

    @classmethod
    def build(cls, contract: Contract, tokenizer: Any, options: Options) -> Rules:
        """Build the sampling rules of a generation request. Raises InputError for a stop string
        that cannot occur."""
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
class RowState:
    """State of the generation of one prompt in a batch.

    number: number of the prompt, Piece.row.
    room: tokens that may still follow.
    seen: ids of the prompt and of the generated tokens.
    """

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
    def start(cls, rules: Rules, prompt: Sequence[int], number: int, drawn: int) -> RowState:
        """Start to generate a text, a row of a batch.

        number: number of the prompt, Piece.row.
        drawn: number that seeds the row's random numbers, together with the seed.
        """
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
        """Choose the next token of a generated text by its scores (vocabulary,) and return it as a
        Piece."""
        rules = self.rules
        if self.follower is not None:
            scores = self.follower.mask_scores(scores)
        token = choose(scores, self.seen, rules.sampling, self.random)
        if self.follower is not None:
            self.follower.add(token)
        self.seen.add(token)
        self.room -= 1
        stop: str | None = None
        if token in rules.ends:
            self.finish, text = "eos", self.stops.add(self.text.flush())
        elif token in rules.stop_tokens:
            self.finish, stop = "stop", rules.stop_tokens[token]
            text = self.stops.add(self.text.flush())
        else:
            text = self.stops.add(self.text.add(token))
            if self.room == 0 and self.stops.matched is None:
                self.finish = "length"
                text += self.stops.add(self.text.flush())
        if self.stops.matched is not None:
            self.finish, stop = "stop", self.stops.matched
        if self.finish is not None:
            text += self.stops.flush()
        return Piece(self.number, token, text, self.finish, stop)


def _stop_tokens(tokenizer: Any, stops: Sequence[str]) -> dict[int, str]:
    """Return {id: stop string} of a generation's stop strings that are special tokens, which print
    nothing.

    Raises InputError for a stop string with a special token among others, which cannot occur.
    """
    stops_by_token = {}
    for stop in stops:
        token = tokenizer.token_to_id(stop)
        if token is not None and not tokenizer.decode([token]):
            stops_by_token[token] = stop
            continue
        encoded = tokenizer.encode(stop, add_special_tokens=False)
        pairs = zip(encoded.ids, encoded.tokens, strict=True)
        silent = [name for i, name in pairs if not tokenizer.decode([i])]
        if silent:
            raise InputError(
                f"{stop!r} contains the special token {silent[0]}, which prints nothing",
                where="stop",
                accepted=f"text, or {silent[0]} by itself",
            )
    return stops_by_token
