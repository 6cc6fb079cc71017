"""Warm-up of text generation: measure whether texts change each other's scores, and step times.

The reference is `predict`: a text alone, its prompt in pieces of the generation loop, then token by
token. Sharing a step, or smaller pieces, may run other kernels whose sums round in another
order. If one bit differs, each text is run by itself, in the pieces of `predict`.

With batching "padded" a difference is accepted and measured, and steps may still be steady: kernels
that take two or four rows at once round a row alike at every position. Steps whose number of rows
is a multiple of that (some rows empty) then give a text the same answer whatever runs with it.
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
from ...tasks.text_generation import arrays, build_step_arrays
from ..scheduling.prefix_cache import PrefixCache
from ..scheduling.slots import cut_pieces
from ..text_model import TextModel
from .latency_model import LatencyLine, fit_line
from .sharing import ALONE, EQUAL, PADDED
from .warm_up import SENTENCES, Progress, silent

REPEATS = 3  # runs; the median counts
SMALLEST = 16  # least tokens of a prompt piece
STALL = 2  # maximum duration of a prompt piece, in steps of all slots
TEXTS = 2  # that are compared alone in a slot
SHORTEST, LONGER = 5, 7  # tokens of the first prompt, and tokens that each next one is longer


@dataclass(frozen=True)
class Measurement:
    """Result of a server's warm-up of text generation (`measure_model`).

    sharing: TextModel.sharing
    difference: largest difference between scores in shared steps and scores of a text alone
    steady: True if a text's scores do not depend on other texts
    piece: tokens of a prompt that one step reads
    read, step: seconds of a prompt piece by number of tokens, of a decode step by number of texts
    compared: number of scores compared
    guess_seconds: {tokens of one text's step: seconds} with prompt lookup
    """

    sharing: str
    difference: float
    steady: bool
    piece: int
    read: LatencyLine
    step: LatencyLine
    compared: int
    guess_seconds: Mapping[int, float]


def measure_model(
    model: TextModel,
    batching: str,
    guesses: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = silent,
) -> Measurement:
    """Measure, in a server's warm-up, whether texts in one step change each other's scores, and the
    seconds of a step.

    batching: "exact", share steps if no score changes; "padded", always; "alone", never
    guesses: maximum tokens per step of prompt lookup; above 0 each text runs by itself
    progress: function that is called before each step

    Prompts are made here, and model.sharing is set. Raises BundleError for scores that are NaN,
    infinite or different in a second run; MachineError if scores depend on guessed tokens.
    """
    guess_seconds: Mapping[int, float] = {}
    if guesses:
        slots = partial(model.runner.slots, model.contract, 1)
        guess_seconds = prompt_lookup.measure_lookup(slots, model.contract, guesses, clock).seconds
        batching = ALONE
    progress("generate each text alone", 1, 3, None)
    texts = prompts(model)
    steps = max(1, min(len(texts), model.context - max(map(len, texts))))
    expected = [run_alone(model, text, steps) for text in texts]
    if not all(np.isfinite(scores).all() for scores in expected):
        raise BundleError("the model's scores are NaN or infinite", where=model.name)
    if not _same([run_alone(model, texts[0], steps)], [expected[0]]):
        raise BundleError(
            "the model gives two answers to one prompt",
            where=model.name,
            fix="Choose another engine with deterministic kernels: --runtime.",
        )
    progress("compare texts alone and in shared steps", 2, 3, None)
    if model.slots.together:
        in_slots = [
            run_together(model, [text], [own])[0]
            for text, own in zip(texts[:TEXTS], expected, strict=False)
        ]
        _check_own(model, in_slots, expected)
    shared = model.slots.together and len(texts) > 1 and batching != ALONE
    difference, steady = _share(model, texts, expected, batching) if shared else (0.0, True)
    progress("time prompts and steps", 3, 3, None)
    read, step = _costs(model, texts, guesses, clock)
    piece = _piece(model, read, step)
    compared = sum(map(len, expected)) if shared else 0
    return Measurement(
        model.sharing, difference, steady, piece, read, step, compared, guess_seconds
    )


def _check_own(
    model: TextModel, scores: Sequence[Sequence[Array]], expected: Sequence[Sequence[Array]]
) -> None:
    """Raise BundleError if the scores of a text in a slot are far from those of `predict`.

    The limit is half of the usual difference between the scores of two texts: more than rounding
    causes, and less than a KV cache in another slot's memory causes.
    """
    for i, steps in enumerate(scores):
        for step, own in enumerate(steps):
            apart = [float(np.linalg.norm(other[step] - expected[i][step])) for other in expected]
            others = apart[:i] + apart[i + 1 :]
            if others and np.linalg.norm(own - expected[i][step]) > median(others) / 2 > 0:
                raise BundleError(
                    "a text in a slot gets scores that are not its own",
                    where=model.name,
                    fix="Choose another engine (--runtime), or leave --batching out.",
                )


def _share(
    model: TextModel,
    texts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[Array]],
    batching: str,
) -> tuple[float, bool]:
    """Choose in the warm-up if texts share steps: set model.sharing; return `difference` and
    `steady` of Measurement."""
    scores = run_together(model, texts, expected)
    if _same(scores, expected):
        model.sharing = EQUAL
        return 0.0, True
    if batching != PADDED:
        return 0.0, True  # each by itself
    _check_own(model, scores, expected)
    model.sharing = PADDED
    while model.slots.multiple <= len(texts):
        apart = [
            run_together(model, [text], [row])[0] for text, row in zip(texts, expected, strict=True)
        ]
        if _same(scores, apart):
            return _difference(scores, expected), True
        model.slots.multiple *= 2
        scores = run_together(model, texts, expected)
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
    """Make prompts for measuring a server's text model, one for each slot; return token ids, all of
    different lengths if the context allows."""
    ids = model.encoder.encode(" ".join(SENTENCES), add_special_tokens=False).ids
    longest = max(1, model.context - model.room.slots)
    lengths = [min(SHORTEST + LONGER * i, longest) for i in range(model.room.slots)]
    repeated = ids * (1 + (max(lengths) + len(ids)) // len(ids))
    return [repeated[i : i + n] for i, n in enumerate(lengths)]


def run_alone(model: TextModel, text: Sequence[int], steps: int, adapter: str = "") -> list[Array]:
    """Return for the warm-up the scores after a text, and after each of `steps` greedy tokens, as
    `predict` computes them."""
    contract = model.contract
    decoder = model.decoders[adapter].decoder(contract, len(text) + steps)
    scores = [prefill(decoder, arrays(contract, [text]), PREFILL)[0]]
    for n in range(steps):
        mask = np.ones((1, len(text) + n + 1), np.int64)
        ids = np.array([[int(scores[-1].argmax())]])
        scores.append(decoder.last(build_step_arrays(contract, ids, mask))[0])
    return scores


def run_together(
    model: TextModel, texts: Sequence[Sequence[int]], expected: Sequence[Sequence[Array]]
) -> list[list[Array]]:
    """Return for the warm-up the scores of each text in shared steps of every size.

    expected: scores of each text alone; their greedy tokens are fed, so that one difference causes
        no other

    A text joins at each step, and leaves once it has all its scores.
    """
    slots, scores = model.slots, [list[Array]() for _ in texts]
    going = list[int]()
    for now in range(2 * len(texts) + len(expected[0])):
        if now < len(texts):
            slots.open(now)
            for start, stop in cut_pieces(len(texts[now]), PREFILL, PREFILL):
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
    """Return True if, in the warm-up, copying a text's prefix from another slot changes no score.

    False also if that cannot be tested.
    """
    slots, length = model.slots, 2 * piece + max(2, piece // 2)
    if not slots.together or model.room.slots < 2 or length > model.context - 2:
        return False
    (text,) = [(ids * (1 + length // len(ids)))[:length] for ids in prompts(model)[-1:]]
    prefixes = PrefixCache(slots, piece, sys.maxsize)
    return all(_prefix_holds(model, text, prefixes, a) for a in ("", *model.adapters))


def _prefix_holds(
    model: TextModel, text: Sequence[int], prefixes: PrefixCache, adapter: str
) -> bool:
    slots, expected = model.slots, run_alone(model, text, 1, adapter)
    for number in (0, 1):  # the second takes another row than the first
        slots.open(number, adapter)
        cached = prefixes.length(text, adapter)
        prefixes.restore(number, text, cached, adapter)
        for start, stop in cut_pieces(len(text), prefixes.piece, PREFILL):
            if start >= cached:
                scores = slots.read(number, text[start:stop])
                prefixes.keep(number, text, start, stop, adapter)
    following = slots.step({1: int(scores.argmax())})[1]
    for number in (0, 1):
        slots.close(number)
    return cached == 2 * prefixes.piece and _same([[scores, following]], [expected])


def _same(ours: Sequence[Sequence[Array]], theirs: Sequence[Sequence[Array]]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        np.array_equal(a, b) for some, other in pairs for a, b in zip(some, other, strict=True)
    )


def _costs(
    model: TextModel, texts: Sequence[Sequence[int]], guesses: int, clock: Callable[[], float]
) -> tuple[LatencyLine, LatencyLine]:
    """Time steps in the server's warm-up; return (seconds of a prompt piece by tokens, seconds of a
    decode step by texts), a fitted LatencyLine each."""
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
    return fit_line(reads), fit_line(steps)


def _piece(model: TextModel, read: LatencyLine, step: LatencyLine) -> int:
    """Choose in the warm-up the tokens per prompt piece.

    This is the largest power of two that takes at most the time of STALL decode steps of all slots,
    if pieces of that size give the same scores; else the piece size of `predict`.
    """
    piece = SMALLEST
    while piece < PREFILL and read.seconds(2 * piece) <= STALL * step.seconds(model.room.slots):
        piece *= 2
    length = min(2 * piece + piece // 2 + 1, model.context - 2)
    if length <= piece:
        return PREFILL
    (text,) = [(ids * (1 + length // len(ids)))[:length] for ids in prompts(model)[-1:]]
    equal = all(_equal_in_pieces(model, text, piece, a) for a in ("", *model.adapters))
    return piece if equal else PREFILL


def _equal_in_pieces(model: TextModel, text: Sequence[int], piece: int, adapter: str) -> bool:
    """Return True if, in the warm-up, a text has the same scores with its prompt in pieces of this
    size."""
    slots, expected = model.slots, run_alone(model, text, 1, adapter)
    slots.open(0, adapter)
    for start, stop in cut_pieces(len(text), piece, PREFILL):
        scores = slots.read(0, text[start:stop])
    following = slots.step({0: int(scores.argmax())})[0]
    slots.close(0)
    return _same([[scores, following]], [expected])
