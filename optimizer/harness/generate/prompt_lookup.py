"""Tokens guessed from the text itself, and checked together in one step of the model.

What followed the newest tokens where they stood before is guessed (prompt lookup decoding, Saxena
2023). One step gives the scores behind each guess; the text chooses its own token by the first, and
by each next one while the token chosen is the one guessed (Leviathan, Kalman, Matias 2023, arXiv
2211.17192). A token is chosen from its scores as without guesses, with the same random number, so
that it does not matter what was guessed, as long as scores do not depend on how many tokens a step
has.

That is measured before it is relied on. Kernels of one row and of several round in different orders
(ONNX Runtime: the attention of one query, 4-bit products in groups of 64 or 128; OpenVINO: the
attention of one query), and some take rows by two. So each step has an even number of tokens, some
of them guessed without a reason.

Law (tested): a text is the same, bit for bit, however many tokens are guessed. Without any it is
the same but for near ties.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import numpy as np

from ..contract import Contract
from ..errors import MachineError
from ..inputs.batch import Array
from ..runtimes.slots import Slots
from .row import Piece, Row

Chosen = TypeVar("Chosen")

LEAST = 2  # tokens of a step; the others are twice as many, and so on
NEWEST = (3, 2, 1)  # tokens that are looked up, the longest run first
PASTS = (5, 150)  # tokens before the steps that are compared
REPEATS = 3  # runs of which the median counts
FORGET = 0.9  # of how guesses did before, at each step


@dataclass(frozen=True)
class PromptLookup:
    """slots: of one text, for so many tokens. seconds: {tokens of a step: what it takes}."""

    slots: Callable[[int], Slots]
    seconds: Mapping[int, float]


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

    def known(self) -> int:
        """How many of the newest tokens stood before, together: one of NEWEST, or 0."""
        return next((n for n in NEWEST if tuple(self._tokens[-n:]) in self._next), 0)

    def guess(self, known: int, count: int) -> list[int]:
        """`count` tokens that followed the `known` newest ones before; beyond the newest token what
        lies between is repeated."""
        place = self._next[tuple(self._tokens[-known:])]
        period = len(self._tokens) - place
        return [self._tokens[place + i % period] for i in range(count)]


class Guesses:
    """What one text guesses at each step. seconds: {tokens of a step: what it takes}.

    The step is taken that gives the most tokens for its time, as guesses behind as many known
    tokens did before: if each is right with probability p, a step of n tokens gives
    1 + p + ... + p^(n-1). p is by Laplace's rule of succession, older steps counting less.
    """

    def __init__(self, tokens: Sequence[int], seconds: Mapping[int, float]) -> None:
        self._seen, self.seconds, self._newest = Seen(tokens), seconds, tokens[-1]
        self._known = 0
        self._right = dict.fromkeys(NEWEST, 0.0)
        self._wrong = dict.fromkeys(NEWEST, 0.0)
        self.guessed = self.right = 0  # tokens so far, those guessed without a reason left out

    def step(self, room: int) -> list[int]:
        """The newest token and the guesses behind it, of which at most `room`, 1 or more, fit."""
        self._known = self._seen.known()
        if not self._known:
            return [self._newest] * LEAST
        size = self._size(room)
        self.guessed += size - 1
        return [self._newest, *self._seen.guess(self._known, size - 1)]

    def _size(self, room: int) -> int:
        right, wrong = self._right[self._known], self._wrong[self._known]
        p = (right + 1) / (right + wrong + 2)

        def tokens_a_second(size: int) -> float:
            return sum(p**i for i in range(size)) / self.seconds[size]

        return max((size for size in self.seconds if size <= room + 1), key=tokens_a_second)

    def chosen(self, step: Sequence[int], tokens: Sequence[int]) -> None:
        """The tokens that the text chose by the scores of a step; none where it ended at once."""
        if not tokens:
            return
        if self._known:
            right = len(tokens) - 1
            self.right += right
            for counts, number in (
                (self._right, right),
                (self._wrong, int(len(tokens) < len(step))),
            ):
                counts[self._known] = FORGET * counts[self._known] + number
        for token in tokens:
            self._seen.add(token)
        self._newest = tokens[-1]


def continued(lookup: PromptLookup, row: Row, prompt: Sequence[int], piece: int) -> Iterator[Piece]:
    """The pieces of a text behind its prompt, which is read `piece` tokens at a time."""
    slots = lookup.slots(len(prompt) + row.room)
    slots.open(0)
    for start in range(0, len(prompt), piece):
        scores = slots.read(0, prompt[start : start + piece])
    first = row.add(scores)
    yield first
    guesses = Guesses([*prompt, first.token], lookup.seconds)

    def choose(scores: Array) -> tuple[Piece, int | None]:
        piece = row.add(scores)
        return piece, None if row.finish else piece.token

    while row.finish is None:
        yield from checked(
            guesses, row.room, partial(slots.scores, 0), partial(slots.undo, 0), choose
        )


def checked(
    guesses: Guesses,
    room: int,
    scored: Callable[[Sequence[int]], Array],
    undo: Callable[[int], None],
    choose: Callable[[Array], tuple[Chosen, int | None]],
) -> list[Chosen]:
    """One step of a text: what `choose` gives, with the token that it is (None: the text has
    ended), for the scores (vocabulary,) behind the newest token and behind each guess that was
    chosen. room: tokens that may still follow. scored, undo: Slots.scores and undo of the text; the
    guesses that were not chosen are undone."""
    step = guesses.step(room)
    chosen, tokens = list[Chosen](), list[int]()
    for scores, guess in zip(scored(step), [*step[1:], None], strict=True):
        one, token = choose(scores)
        chosen.append(one)
        if token is not None:
            tokens.append(token)
        if token is None or token != guess:
            break
    undo(len(step) - len(chosen))
    guesses.chosen(step, tokens)
    return chosen


def by_two(scored: Callable[[Sequence[int]], Array], tokens: Sequence[int]) -> Array:
    """What `scored` gives for the tokens in steps of LEAST: what steps of more are to give."""
    parts = range(0, len(tokens), LEAST)
    return np.concatenate([scored(tokens[i : i + LEAST]) for i in parts])


def measured(
    slots: Callable[[int], Slots],
    contract: Contract,
    guesses: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PromptLookup:
    """A lookup of at most so many tokens, one less than a power of two; what its steps take is
    measured. Raises MachineError where a text would depend on how many tokens are guessed."""
    seconds: dict[int, float] = {}
    for past in PASTS:
        times = compared(slots, contract, past, guesses + 1, clock)
        if times is None:
            raise MachineError(
                "a step of several tokens gives one of them other scores than a step of two, with "
                "this engine on this processor",
                where=f"prompt lookup of {guesses} tokens",
                accepted="a cache that takes tokens back (ONNX Runtime and OpenVINO on a CPU), and "
                "kernels that give a row the same bits in all of these steps",
                fix="Leave it out: tokens are then drawn one by one.",
            )
        seconds.update(times)
    return PromptLookup(slots, seconds)


def compared(
    of_tokens: Callable[[int], Slots],
    contract: Contract,
    past: int,
    most: int,
    clock: Callable[[], float],
) -> dict[int, float] | None:
    """{tokens of a step: seconds} behind a text of `past` tokens, if steps of LEAST, twice as many
    and so on up to `most` tokens give the scores that steps of LEAST give, in every bit, also where
    others were forgotten; None if not. of_tokens: PromptLookup.slots."""
    spec = contract.decoder
    past = min(past, spec.context - most - 1)
    slots = of_tokens(past + most) if past > 0 else None
    if slots is None or not slots.together:
        return None
    ids = [i * 7919 % spec.vocabulary for i in range(past + most)]  # all kinds of tokens
    slots.open(0)
    slots.read(0, ids[:past])
    new, seconds = ids[past:], dict[int, float]()
    expected = by_two(partial(slots.scores, 0), new)
    slots.undo(0, most)
    size = LEAST
    while size <= most:
        times = []
        for _ in range(REPEATS):
            start = clock()
            scores = slots.scores(0, new[:size])
            times.append(clock() - start)
            slots.undo(0, size)
            if not np.array_equal(scores, expected[:size]):
                return None
        seconds[size] = median(times)
        size *= 2
    slots.close(0)
    return seconds
