"""Time text generation: first token, next tokens, tokens per second.

    ttft           time to the first token: prefill, and one choice
    inter_token    time from one token to the next, every step of every round
    by_context     the same by context length, as each step reads the KV cache

In each round every system continues the same prompts greedily, to the same number of tokens and
past the end of text, in an order that changes (statistics: bench.py). The timed call is
`generate.stream` on token ids: model, KV cache, choice and text of each token. Intervals take steps
as independent; steps within a round are not quite, so those of inter_token are slightly narrow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..contract import Contract
from ..errors import InputError
from ..generate import Options, stream
from ..generate.loop import batches
from ..process.collection import pause_collection
from ..runtimes.decoder import DecoderRunner
from ..runtimes.machine import describe_machine
from .bench import Again, compare_times, order_systems, percentiles, plan_rounds

Rounds = list[tuple[float, list[float]]]  # per round: ms to the first token, and to each next one
BINS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def measure_generation(
    systems: Mapping[str, DecoderRunner],
    contract: Contract,
    tokenizer: Any,
    prompts: Sequence[str],
    lengths: Sequence[int],
    batch: Sequence[int] = (1,),
    new_tokens: int = 32,
    iterations: int = 10,
    *,
    warmup: int = 1,
    threads: int = 0,
    baseline: str = "onnxruntime-float",
    candidate: str = "candidate",
    more: Callable[[Mapping[str, Rounds]], int] | None = None,
    again: Again | None = None,
) -> dict[str, Any]:
    """Time bundles that generate text: {"machine", "threads", "cells": [...]}, in ms; a cell per
    batch and prompt length.

    prompts: real texts; their tokens are joined and cut to exactly each of `lengths`
    new_tokens: tokens generated per row, so new_tokens - 1 times between tokens
    iterations: rounds that count
    more: function of {system: rounds so far} that returns further rounds; 0 ends
    again: plan for opening the systems again; None: they stay open

    A cell: {"batch", "prompt", "new_tokens", "runs", "systems": {name: {"ttft", "inter_token":
    percentiles, "by_context": [{"up_to", "p50", "steps"}], "prefill_tokens_per_second",
    "tokens_per_second"}}, "ratio": {"of", "to", "ttft", "inter_token"}}; ratio (candidate over
    baseline by round, below 1 is faster) exists if both systems are given.

    Raises InputError if there is nothing to measure, or a cell does not fit the context.
    """
    options = _checked(systems, contract, lengths, batch, new_tokens, iterations)
    tokens = [i for text in prompts for i in tokenizer.encode(text).ids]
    if not tokens:
        raise InputError("the prompts have no token", where="prompts")
    cells = []
    for rows in batch:
        for length in lengths:
            rounds = _run_rounds(
                systems,
                (contract, tokenizer),
                _prompts(tokens, rows, length),
                options,
                lambda more: plan_rounds(iterations, warmup, again, more),
                more,
            )
            cell: dict[str, Any] = {
                "batch": rows,
                "prompt": length,
                "new_tokens": new_tokens,
                "runs": len(next(iter(rounds.values()))),
                "systems": {n: _summary(r, rows, length) for n, r in rounds.items()},
            }
            if baseline in rounds and candidate in rounds:
                cell["ratio"] = _ratio(rounds, candidate, baseline)
            cells.append(cell)
    return {"machine": describe_machine().to_json(), "threads": threads, "cells": cells}


def _checked(
    systems: Mapping[str, DecoderRunner],
    contract: Contract,
    lengths: Sequence[int],
    batch: Sequence[int],
    new_tokens: int,
    iterations: int,
) -> Options:
    """Check the arguments of timing a bundle's text generation; return the generation options of
    every cell.

    Raises InputError for arguments out of range.
    """
    spec = contract.decoder
    value: Sequence[Any]
    for name, value in (("systems", [*systems]), ("lengths", lengths), ("batch", batch)):
        if not value:
            raise InputError("none were given", where=name)
    if new_tokens < 2 or iterations < 1:
        raise InputError(
            f"{new_tokens} new tokens and {iterations} rounds are too few",
            where="new_tokens, iterations",
            accepted="2 new tokens or more, and 1 round or more",
        )
    longest = max(lengths) + new_tokens
    if longest > spec.context or min(lengths) < 1:
        raise InputError(
            f"{max(lengths)} tokens and {new_tokens} new ones",
            where="lengths",
            accepted=f"together 2 to {spec.context}, the model's context",
        )
    options = Options(new_tokens, do_sample=False, ignore_eos=True)
    for rows in batch:
        if len(list(batches(contract, [max(lengths)] * rows, options, rows))) > 1:
            raise InputError(
                f"{rows} prompts of {max(lengths)} tokens do not run as one batch: too many logits",
                where="batch",
                fix="Time a smaller batch, or shorter prompts.",
            )
    return options


def _prompts(tokens: list[int], rows: int, length: int) -> Iterator[list[list[int]]]:
    """Yield prompts to time a bundle with: batches of `rows` rows of `length` tokens; a row starts
    where the last row ended."""
    at = 0
    while True:
        batch = []
        for _ in range(rows):
            batch.append([tokens[(at + i) % len(tokens)] for i in range(length)])
            at += length
        yield batch


def _run_rounds(
    systems: Mapping[str, DecoderRunner],
    model: tuple[Contract, Any],
    prompts: Iterator[list[list[int]]],
    options: Options,
    plan: Callable[[Callable[[], int] | None], Iterator[bool]],
    more: Callable[[Mapping[str, Rounds]], int] | None,
) -> dict[str, Rounds]:
    """Time the generation of text in all rounds; return {system: [(ms to the first token, ms of
    each step)] by round}."""
    times: dict[str, Rounds] = {n: [] for n in systems}
    names = list(systems)
    with pause_collection():  # a collection would be charged to another system than caused it
        done = 0
        for counts in plan((lambda: more(times)) if more else None):
            batch = next(prompts)
            for name in order_systems(names, done):
                taken = _time_batch(systems[name], model, batch, options)
                times[name] += [taken] if counts else []
            done += counts
    return times


def _time_batch(
    runner: DecoderRunner, model: tuple[Contract, Any], batch: list[list[int]], options: Options
) -> tuple[float, list[float]]:
    """Time the generation of one batch: ms to the first token of all rows, and from each step to
    the next."""
    contract, tokenizer = model
    last, clock = len(batch) - 1, time.perf_counter
    marks = [clock()]
    pieces = stream(contract, runner, tokenizer, batch, options, batch_size=len(batch))
    marks += [clock() for piece in pieces if piece.row == last]
    steps = [(b - a) * 1e3 for a, b in pairwise(marks)]
    return steps[0], steps[1:]


def _summary(rounds: Rounds, batch: int, prompt: int) -> dict[str, Any]:
    """Return the entry of a timed system, such as a bundle, in a cell: percentiles in ms, and
    tokens per second.

    rounds: (ms to the first token, ms of each step) by round
    prompt: tokens per prompt
    """
    firsts = [first for first, _ in rounds]
    steps = [s for _, own in rounds for s in own]
    bins: dict[int, list[float]] = {}
    for _, own in rounds:
        for i, taken in enumerate(own):
            bins.setdefault(_bin(prompt + 1 + i), []).append(taken)
    return {
        "ttft": {**percentiles(firsts), "samples": [round(t, 4) for t in firsts]},
        "inter_token": percentiles(steps),
        "by_context": [
            {"up_to": up_to, "p50": percentiles(taken)["p50"], "steps": len(taken)}
            for up_to, taken in sorted(bins.items())
        ],
        "prefill_tokens_per_second": batch * prompt * len(firsts) / sum(firsts) * 1e3,
        "tokens_per_second": batch * len(steps) / sum(steps) * 1e3,
    }


def _bin(context: int) -> int:
    return next((b for b in BINS if context <= b), context)


def _ratio(rounds: Mapping[str, Rounds], candidate: str, baseline: str) -> dict[str, Any]:
    ours, theirs = rounds[candidate], rounds[baseline]
    return {
        "of": candidate,
        "to": baseline,
        "ttft": compare_times([f for f, _ in ours], [f for f, _ in theirs]),
        "inter_token": compare_times([sum(s) for _, s in ours], [sum(s) for _, s in theirs]),
    }
