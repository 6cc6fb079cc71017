"""Tokens guessed from the text itself, and checked together in one step of the model.

What followed the newest tokens where they stood before is guessed (prompt lookup decoding, Saxena
2023). One step gives the scores behind each guess; the text chooses its own token by the first, and
by each next one while the token chosen is the one guessed (Leviathan, Kalman, Matias 2023, arXiv
2211.17192). A token is chosen from its scores as without guesses, with the same random number, so
that it does not matter what was guessed, as long as scores do not depend on how many tokens a step
has.

That is measured before it is relied on (`steady`). Kernels of one row and of several round in
different orders (ONNX Runtime: the attention of one query, 4-bit products in groups of 64 or 128),
and those take rows by two. So each step has an even number of tokens, some of them guessed without
a reason.

Law (tested): a text is the same, bit for bit, however many tokens are guessed. Without any it is
the same but for near ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..contract import Contract
from ..errors import MachineError
from ..inputs.batch import Array
from ..runtimes.slots import Slots
from .row import Piece, Row

Chosen = TypeVar("Chosen")

TOGETHER = 2  # the tokens of a step are a multiple of it
NEWEST = (3, 2, 1)  # tokens that are looked up, the longest run first
PASTS = (5, 150)  # tokens before the steps that are compared


@dataclass(frozen=True)
class PromptLookup:
    """slots: of one text, for so many tokens. guesses: tokens that are guessed at once, at most; an
    odd number, as the newest token is in the step too."""

    slots: Callable[[int], Slots]
    guesses: int


class Seen:
    """The tokens of a text, and where each run of NEWEST tokens in it was last continued."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # run -> place of what followed it
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        place = len(self._tokens)
        for n in NEWEST:
            if place >= n:
                self._next[tuple(self._tokens[-n:])] = place
        self._tokens.append(token)

    def guess(self, count: int) -> list[int]:
        """`count` tokens that may follow; none where the newest ones never stood before."""
        for n in NEWEST:
            place = self._next.get(tuple(self._tokens[-n:]))
            if place is not None:
                period = len(self._tokens) - place  # beyond the newest token it is repeated
                return [self._tokens[place + i % period] for i in range(count)]
        return []


class Guesses:
    """What one text guesses at each step. most: tokens, an odd number.

    After a step whose guesses were not all chosen one token is guessed, after one whose were,
    `most`.
    """

    def __init__(self, tokens: Sequence[int], most: int) -> None:
        self._seen, self._most, self._count = Seen(tokens), most, most
        self._newest = tokens[-1]
        self.guessed = self.right = 0  # tokens so far, those guessed without a reason left out

    def step(self, room: int) -> list[int]:
        """The newest token and the guesses behind it, of which at most `room` fit the text."""
        count = min(self._count, room)
        count -= 1 - count % TOGETHER  # odd: with the newest token they are an even number
        guesses = self._seen.guess(count)
        self.guessed += len(guesses)
        return [self._newest, *(guesses or [self._newest])]

    def chosen(self, step: Sequence[int], tokens: Sequence[int]) -> None:
        """The tokens that the text chose by the scores of a step; none where it ended at once."""
        if not tokens:
            return
        self.right += len(tokens) - 1
        self._count = self._most if len(tokens) == len(step) else 1
        for token in tokens:
            self._seen.add(token)
        self._newest = tokens[-1]


def continued(
    slots: Slots, row: Row, prompt: Sequence[int], most: int, piece: int
) -> Iterator[Piece]:
    """The pieces of a text behind its prompt, which is read `piece` tokens at a time."""
    slots.open(0)
    for start in range(0, len(prompt), piece):
        scores = slots.read(0, prompt[start : start + piece])
    first = row.add(scores)
    yield first
    guesses = Guesses([*prompt, first.token], most)

    def choose(scores: Array) -> tuple[Piece, int | None]:
        piece = row.add(scores)
        return piece, None if row.finish else piece.token

    while row.finish is None:
        yield from checked(slots, 0, guesses, row.room, choose)


def checked(
    slots: Slots,
    text: int,
    guesses: Guesses,
    room: int,
    choose: Callable[[Array], tuple[Chosen, int | None]],
) -> list[Chosen]:
    """One step of a text: what `choose` gives, with the token that it is (None: the text has
    ended), for the scores (vocabulary,) behind the newest token and behind each guess that was
    chosen. The other guesses are forgotten. room: tokens that may still follow."""
    step = guesses.step(room)
    chosen, tokens = list[Chosen](), list[int]()
    for scores, guess in zip(slots.scores(text, step), [*step[1:], None], strict=True):
        one, token = choose(scores)
        chosen.append(one)
        if token is not None:
            tokens.append(token)
        if token is None or token != guess:
            break
    slots.undo(text, len(step) - len(chosen))
    guesses.chosen(step, tokens)
    return chosen


def check(lookup: PromptLookup, contract: Contract) -> None:
    """Raises MachineError where a text would not be the same for any number of guesses."""
    if not steady(lookup, contract):
        raise MachineError(
            "a step of several tokens gives one of them other scores than a step of two, with "
            "this engine on this processor",
            where=f"prompt lookup of {lookup.guesses} tokens",
            accepted="ONNX Runtime on a CPU, the cache in one buffer, with most kernels",
            fix="Leave it out: tokens are then drawn one by one.",
        )


def steady(lookup: PromptLookup, contract: Contract) -> bool:
    """Whether steps of every even number of tokens up to the guesses' give the scores that steps of
    two give, in every bit, behind a short text and a long one; also where tokens were forgotten."""
    spec, most = contract.decoder, lookup.guesses + 1
    for past in sorted({min(past, spec.context - most - 1) for past in PASTS}):
        if past < 1:
            return False
        slots = lookup.slots(past + most)
        if not slots.together:
            return False
        ids = [i * 7919 % spec.vocabulary for i in range(past + most)]  # all kinds of tokens
        slots.open(0)
        slots.read(0, ids[:past])
        new = ids[past:]
        pairs = [slots.scores(0, new[i : i + TOGETHER]) for i in range(0, most, TOGETHER)]
        expected = np.concatenate(pairs)
        for size in range(TOGETHER, most + 1, TOGETHER):
            slots.undo(0, most if size == TOGETHER else size - TOGETHER)
            scores = slots.scores(0, new[:size])
            if not np.array_equal(scores, expected[:size]):
                return False
        slots.close(0)
    return True
