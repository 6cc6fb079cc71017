"""Prompt lookup decoding: guess tokens from the text itself and verify them in one step.

The guesses are the tokens that followed an earlier occurrence of the newest tokens (Saxena 2023).
One step returns the scores after each guess. Tokens are chosen from these scores in order while the
chosen token equals the guess (Leviathan, Kalman, Matias 2023, arXiv 2211.17192). Every token is
chosen as without guesses, with the same random number, so the guesses do not change the text, as
long as scores do not depend on the number of tokens in a step.

This condition is measured first (`measure_lookup`). Kernels for one row and for several rows round
in different orders (ONNX Runtime: attention of one query, 4-bit products in groups of 64 or 128;
OpenVINO: attention of one query), and some process rows in pairs. So each step has an even number
of tokens; arbitrary guesses fill it up.

Law (tested): the text is identical in every bit for every number of guesses. It may differ from the
text without prompt lookup when two tokens have nearly equal scores.
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
from .row import Piece, RowState

Chosen = TypeVar("Chosen")

LEAST = 2  # minimum tokens per step; other step sizes are 4, 8, ...
NEWEST = (3, 2, 1)  # lengths of the looked-up suffix, longest first
PASTS = (5, 150)  # tokens in the KV cache when steps are compared
REPEATS = 3  # timed runs; the median counts
DECAY = 0.9  # weight of earlier guesses per step


@dataclass(frozen=True)
class PromptLookup:
    """Prompt lookup on one engine: guesses next tokens from earlier text to generate faster.

    slots: (capacity in tokens) -> Slots with one row.
    seconds: {tokens per step: seconds}.
    """

    slots: Callable[[int], Slots]
    seconds: Mapping[int, float]


class SeenTokens:
    """Tokens of a generated text, and an index of the token that last followed each run of 1 to 3
    tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # run -> index of the token after it
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text so far, and to the index in which guesses of next tokens are
        looked up."""
        place = len(self._tokens)
        for n in NEWEST:
            if place >= n:
                self._next[tuple(self._tokens[-n:])] = place
        self._tokens.append(token)

    def match_length(self) -> int:
        """Return the length (3, 2 or 1) of the longest end of the text that occurred before, behind
        which the next tokens are guessed; 0 for none."""
        return next((n for n in NEWEST if tuple(self._tokens[-n:]) in self._next), 0)

    def guess(self, length: int, count: int) -> list[int]:
        """Guess next tokens: return the `count` tokens after the last earlier occurrence of the
        newest `length` tokens, repeated periodically beyond the end of the text."""
        place = self._next[tuple(self._tokens[-length:])]
        period = len(self._tokens) - place
        return [self._tokens[place + i % period] for i in range(count)]


class Guesses:
    """Chooses how many next tokens are guessed in a step of one text.

    seconds: {tokens per step: seconds}.
    The step size maximizes the expected tokens per second: if each guess is right with probability
    p, a step of n tokens gives 1 + p + ... + p^(n-1) tokens. p is estimated per match length by
    Laplace's rule of succession, with decaying weights of earlier steps.
    """

    def __init__(self, tokens: Sequence[int], seconds: Mapping[int, float]) -> None:
        self._seen, self.seconds, self._newest = SeenTokens(tokens), seconds, tokens[-1]
        self._length = 0
        self._right = dict.fromkeys(NEWEST, 0.0)
        self._wrong = dict.fromkeys(NEWEST, 0.0)
        self.guessed = self.right = 0  # guessed tokens so far, arbitrary ones excluded

    def step(self, room: int) -> list[int]:
        """Return the newest token and the guesses of next tokens after it, LEAST tokens or more.

        room: maximum number of guesses, at least 1.
        """
        self._length = self._seen.match_length()
        if not self._length:
            return [self._newest] * LEAST
        size = self._size(room)
        self.guessed += size - 1
        return [self._newest, *self._seen.guess(self._length, size - 1)]

    def _size(self, room: int) -> int:
        right, wrong = self._right[self._length], self._wrong[self._length]
        p = (right + 1) / (right + wrong + 2)

        def tokens_a_second(size: int) -> float:
            return sum(p**i for i in range(size)) / self.seconds[size]

        return max((size for size in self.seconds if size <= room + 1), key=tokens_a_second)

    def update(self, step: Sequence[int], tokens: Sequence[int]) -> None:
        """Record the tokens that a step of guesses generated, except the token that ended the
        text."""
        if not tokens:
            return
        if self._length:
            right = len(tokens) - 1
            self.right += right
            for counts, number in (
                (self._right, right),
                (self._wrong, int(len(tokens) < len(step))),
            ):
                counts[self._length] = DECAY * counts[self._length] + number
        for token in tokens:
            self._seen.add(token)
        self._newest = tokens[-1]


def generate_row(
    lookup: PromptLookup, row: RowState, prompt: Sequence[int], piece: int
) -> Iterator[Piece]:
    """Generate the text of one prompt by guessing next tokens (prompt lookup), and yield its
    pieces.

    piece: maximum tokens per run of prefill.
    """
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
        yield from verify_step(
            guesses, row.room, partial(slots.scores, 0), partial(slots.undo, 0), choose
        )


def verify_step(
    guesses: Guesses,
    room: int,
    scored: Callable[[Sequence[int]], Array],
    undo: Callable[[int], None],
    choose: Callable[[Array], tuple[Chosen, int | None]],
) -> list[Chosen]:
    """Run the newest token and the guesses after it through the model at once, and choose tokens up
    to and including the first that differs from its guess.

    room: maximum tokens that may still follow
    scored: function from tokens to the scores after each (Slots.scores of the text's slot)
    undo: function that removes a count of newest tokens from the KV cache (Slots.undo of that slot)
    choose: function from scores (vocabulary,) to (result, its token; None at the end of the text)

    Returns the results of `choose`, at least one.
    """
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
    guesses.update(step, tokens)
    return chosen


def score_in_pairs(scored: Callable[[Sequence[int]], Array], tokens: Sequence[int]) -> Array:
    """Return the scores after each token of a generated text, computed in steps of LEAST tokens.

    They are the reference for larger steps. scored: function from tokens to scores after each
    """
    parts = range(0, len(tokens), LEAST)
    return np.concatenate([scored(tokens[i : i + LEAST]) for i in parts])


def measure_lookup(
    slots: Callable[[int], Slots],
    contract: Contract,
    guesses: int,
    clock: Callable[[], float] = time.perf_counter,
) -> PromptLookup:
    """Time the steps of prompt lookup and check that they do not change scores.

    guesses: maximum guesses per step, one less than a power of two.
    Raises MachineError if the text would depend on the number of guesses.
    """
    seconds: dict[int, float] = {}
    for past in PASTS:
        times = compare_steps(slots, contract, past, guesses + 1, clock)
        if times is None:
            raise MachineError(
                "a step of more tokens gives other scores than a step of two tokens with this "
                "engine on this processor",
                where=f"prompt lookup of {guesses} tokens",
                accepted="an engine with a rewindable KV cache (ONNX Runtime or OpenVINO on a CPU) "
                "whose kernels give a row the same bits in steps of any size",
                fix="Leave prompt lookup out.",
            )
        seconds.update(times)
    return PromptLookup(slots, seconds)


def compare_steps(
    of_tokens: Callable[[int], Slots],
    contract: Contract,
    past: int,
    most: int,
    clock: Callable[[], float],
) -> dict[int, float] | None:
    """Compare steps of prompt lookup: return {tokens per step: seconds}; None if larger steps
    change a bit of scores or cannot run.

    Steps of LEAST, 2 * LEAST, ... up to `most` tokens are compared, also after undone tokens.
    of_tokens: PromptLookup.slots.
    past: tokens in the KV cache before the steps.
    """
    spec = contract.decoder
    past = min(past, spec.context - most - 1)
    slots = of_tokens(past + most) if past > 0 else None
    if slots is None or not slots.together:
        return None
    ids = [i * 7919 % spec.vocabulary for i in range(past + most)]  # spread over the vocabulary
    slots.open(0)
    slots.read(0, ids[:past])
    new, seconds = ids[past:], dict[int, float]()
    expected = score_in_pairs(partial(slots.scores, 0), new)
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
