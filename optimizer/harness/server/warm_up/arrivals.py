"""Before the first request: whether texts that come and go change each other's answers, measured
on this machine with this model, and how long a piece of a prompt and a step take.

What a text has alone is what `predict` gives it: its prompt in pieces of the generation loop, then
one token at a time. Sharing a step, or smaller pieces, may take other kernels whose sums round in
another order; an older bundle's graph has one length for all rows. Nothing is assumed: one bit
that differs, and each text is run by itself, in the pieces that `predict` takes.

Where the server's owner accepts a difference, it is measured, and steps may still be steady:
kernels that take two or four rows at once round a row alike wherever it lies, so that steps of a
multiple of so many rows, some empty, give a text one answer whatever runs beside it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from ...errors import BundleError
from ...generate import prompt_lookup
from ...generate.loop import PREFILL, prefill
from ...inputs.batch import Array
from ...tasks.text_generation import arrays, next_arrays
from ..scheduling.prefixes import Prefixes
from ..scheduling.slots import pieces
from ..text_model import TextModel
from .costs import Line, fitted
from .exactness import ALONE, EQUAL, PADDED
from .warm_up import SENTENCES

REPEATS = 3  # runs of which the median counts
SMALLEST = 16  # tokens of a piece of a prompt
STALL = 2  # steps of all slots that a piece of a prompt may take
SHORTEST, LONGER = 5, 7  # tokens of the first prompt, and by how many the next is longer


@dataclass(frozen=True)
class Measured:
    """sharing: as TextModel has it. difference: the largest of a score from that of its text alone.
    steady: whether a text's scores do not depend on the others. piece: tokens of a prompt that are
    read at once. read, step: seconds by tokens, and by texts. compared: scores. guess_seconds: by
    the tokens of one text, where some of them are guessed."""

    sharing: str
    difference: float
    steady: bool
    piece: int
    read: Line
    step: Line
    compared: int
    guess_seconds: Mapping[int, float]


def measured(
    model: TextModel,
    batching: str,
    guesses: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """See the module; also sets model.sharing. batching: "exact", together only where that changes
    nothing; "padded", whatever it changes; "alone". guesses: tokens of a text that are guessed at
    once, at most; each is run by itself then. Raises BundleError for a model whose scores are no
    numbers, or not the same twice, MachineError where they depend on what is guessed."""
    guess_seconds: Mapping[int, float] = {}
    if guesses:
        slots = partial(model.runner.slots, model.contract, 1)
        guess_seconds = prompt_lookup.measure_lookup(slots, model.contract, guesses, clock).seconds
        batching = ALONE
    texts = prompts(model)
    steps = max(1, min(len(texts), model.context - max(map(len, texts))))
    expected = [alone(model, text, steps) for text in texts]
    if not all(np.isfinite(scores).all() for scores in expected):
        raise BundleError("its scores are NaN or infinite", where=model.name)
    if not _same([alone(model, texts[0], steps)], [expected[0]]):
        raise BundleError(
            "it gives one text in two ways",
            where=model.name,
            fix="Take another engine (--runtime), whose kernels are deterministic.",
        )
    shared = model.slots.together and len(texts) > 1 and batching != ALONE
    difference, steady = _share(model, texts, expected, batching) if shared else (0.0, True)
    read, step = _costs(model, texts, guesses, clock)
    piece = _piece(model, read, step)
    compared = sum(map(len, expected)) if shared else 0
    return Measured(model.sharing, difference, steady, piece, read, step, compared, guess_seconds)


def _share(
    model: TextModel,
    texts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[Array]],
    batching: str,
) -> tuple[float, bool]:
    """Decide model.sharing; the difference, and whether scores do not depend on other texts."""
    scores = together(model, texts, expected)
    if _same(scores, expected):
        model.sharing = EQUAL
        return 0.0, True
    if batching != PADDED:
        return 0.0, True  # each by itself
    model.sharing = PADDED
    while model.slots.multiple <= len(texts):
        apart = [
            together(model, [text], [row])[0] for text, row in zip(texts, expected, strict=True)
        ]
        if _same(scores, apart):
            return _difference(scores, expected), True
        model.slots.multiple *= 2
        scores = together(model, texts, expected)
    model.slots.multiple = 1
    return _difference(scores, expected), False


def _difference(ours: Sequence[Sequence[Array]], theirs: Sequence[Sequence[Array]]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(
        float(np.abs(a - b).max())
        for some, other in pairs
        for a, b in zip(some, other, strict=True)
    )


def prompts(model: TextModel) -> list[list[int]]:
    """Token ids of a text for each slot, no two of a length where the context allows it."""
    ids = model.encoder.encode(" ".join(SENTENCES), add_special_tokens=False).ids
    longest = max(1, model.context - model.room.slots)
    lengths = [min(SHORTEST + LONGER * i, longest) for i in range(model.room.slots)]
    repeated = ids * (1 + (max(lengths) + len(ids)) // len(ids))
    return [repeated[i : i + n] for i, n in enumerate(lengths)]


def alone(model: TextModel, text: Sequence[int], steps: int) -> list[Array]:
    """The scores of the likeliest tokens after a text, as `predict` computes them."""
    contract = model.contract
    decoder = model.runner.decoder(contract, len(text) + steps)
    scores = [prefill(decoder, arrays(contract, [text]), PREFILL)[0]]
    for n in range(steps):
        mask = np.ones((1, len(text) + n + 1), np.int64)
        ids = np.array([[int(scores[-1].argmax())]])
        scores.append(decoder.step(next_arrays(contract, ids, mask))[0, -1])
    return scores


def together(
    model: TextModel, texts: Sequence[Sequence[int]], expected: Sequence[Sequence[Array]]
) -> list[list[Array]]:
    """The same scores where a text joins at every step and leaves when it has as many as are
    expected, so that steps of every number of texts are among them. All take the tokens expected,
    so that one difference does not become others."""
    slots, scores = model.slots, [list[Array]() for _ in texts]
    going = list[int]()
    for now in range(2 * len(texts) + len(expected[0])):
        if now < len(texts):
            slots.open(now)
            for start, stop in pieces(len(texts[now]), PREFILL, PREFILL):
                first = slots.read(now, texts[now][start:stop])
            scores[now].append(first)
            going.append(now)
        tokens = {i: int(expected[i][len(scores[i]) - 1].argmax()) for i in going}
        for i, row in slots.step(tokens).items() if tokens else ():
            scores[i].append(row)
        for i in [i for i in going if len(scores[i]) == len(expected[i])]:
            slots.close(i)
            going.remove(i)
    return scores


def prefixes_hold(model: TextModel, piece: int) -> bool:
    """Whether a text whose first pieces are copied from another's slot has the scores that it has
    alone, here with the same tokens in another row."""
    slots, length = model.slots, 2 * piece + max(2, piece // 2)
    if not slots.together or model.room.slots < 2 or length > model.context - 2:
        return False
    (text,) = [(ids * (1 + length // len(ids)))[:length] for ids in prompts(model)[-1:]]
    expected = alone(model, text, 1)
    prefixes = Prefixes(slots, piece, sys.maxsize)
    for number in (0, 1):  # the second has a row of its own beside the first
        slots.open(number)
        kept = prefixes.length(text)
        prefixes.restore(number, text, kept)
        for start, stop in pieces(length, piece, PREFILL):
            if start >= kept:
                scores = slots.read(number, text[start:stop])
                prefixes.keep(number, text, start, stop)
    following = slots.step({1: int(scores.argmax())})[1]
    for number in (0, 1):
        slots.close(number)
    return kept == 2 * piece and _same([[scores, following]], [expected])


def _same(ours: Sequence[Sequence[Array]], theirs: Sequence[Sequence[Array]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        np.array_equal(a, b) for some, other in pairs for a, b in zip(some, other, strict=True)
    )


def _costs(
    model: TextModel, texts: Sequence[Sequence[int]], guesses: int, clock: Callable[[], float]
) -> tuple[Line, Line]:
    """Of reading a prompt, by its tokens, and of a step, by its texts."""
    slots, room = model.slots, model.context - 2 * REPEATS - guesses
    ids = list(texts[-1]) * (1 + 4 * SMALLEST // len(texts[-1]))
    reads = []
    for length in sorted({max(1, min(n, room)) for n in (SMALLEST, 4 * SMALLEST)}):
        times = []
        for _ in range(REPEATS):
            slots.open(0)
            start = clock()
            slots.read(0, ids[:length])
            times.append(clock() - start)
            slots.close(0)
        reads.append((length, median(times)))
    counts = [1] if model.sharing == ALONE else sorted({1, len(texts)})
    steps = []
    for i in range(max(counts)):
        slots.open(i)
        slots.read(i, ids[: max(1, min(SMALLEST, room))])
    for count in counts:
        times = []
        for _ in range(REPEATS):
            start = clock()
            if guesses:
                slots.scores(0, ids[: guesses + 1])
                slots.undo(0, guesses)
            else:
                slots.step(dict.fromkeys(range(count), ids[0]))
            times.append(clock() - start)
        steps.append((count, median(times)))
    for i in range(max(counts)):
        slots.close(i)
    return fitted(reads), fitted(steps)


def _piece(model: TextModel, read: Line, step: Line) -> int:
    """The largest power of two whose reading takes no longer than STALL steps of all slots, if
    pieces of it give the scores of the whole."""
    piece = SMALLEST
    while piece < PREFILL and read.seconds(2 * piece) <= STALL * step.seconds(model.room.slots):
        piece *= 2
    length = min(2 * piece + piece // 2 + 1, model.context - 2)
    if length <= piece:
        return PREFILL
    (text,) = [(ids * (1 + length // len(ids)))[:length] for ids in prompts(model)[-1:]]
    expected = alone(model, text, 1)
    slots = model.slots
    slots.open(0)
    for start, stop in pieces(length, piece, PREFILL):
        scores = slots.read(0, text[start:stop])
    following = slots.step({0: int(scores.argmax())})[0]
    slots.close(0)
    return piece if _same([[scores, following]], [expected]) else PREFILL
