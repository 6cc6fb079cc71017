"""Timing of one system of systems.py.

Encoder, for each batch and sequence: `end_to_end` from host arrays to host arrays, and `forward`
with inputs on the device where a system offers that; each call is waited for. Rounds before the
clock has settled are discarded. Decoder: a prompt, then one token at a time, chosen greedily on the
host; the KV cache stays where the system has it.

A cell with wrong answers (check.py) is not timed. `done` gets the cells after each one, the most
important first, so that a run that is stopped has the finished ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.gpu.check import (
    NEW,
    PROMPT,
    Judge,
    continuing,
    decoder_problem,
    encoder_problem,
    ids,
)

Left = Callable[[], float]
Cell = dict[str, Any]
Done = Callable[[list[Cell]], None]
ROUNDS, SETTLING, AT_MOST = 200, 10, 1.5  # seconds of one cell
TOLD = ((1, 128), (32, 128), (8, 128), (1, 16), (32, 256))
"""(batch, sequence) by importance; the others follow."""


def encode(
    system: Any, grid: Mapping[str, Any], judge: Judge, left: Left, done: Done
) -> list[Cell]:
    """Time an encoder.

    Returns [{"batch", "sequence", "end_to_end", "forward", "texts_per_second"} | {..., "why"} |
    {..., "wrong": answers beyond the tolerance}].
    """
    every = [(b, s) for b in grid["batch"] for s in grid["sequence"]]
    order = [c for c in TOLD if c in every] + [c for c in every if c not in TOLD]
    cells = [{"batch": b, "sequence": s, "why": "not run: time"} for b, s in order]
    for cell in timely(cells, 3 * AT_MOST, left, done):
        batch, sequence = cell["batch"], cell["sequence"]
        arrays = ids(batch, sequence)
        start = time.perf_counter()
        system.infer(arrays)
        first = time.perf_counter() - start
        if wrong := encoder_problem(system, judge, batch, sequence):
            cell["wrong"] = wrong
            continue
        cell["first_seconds"] = first
        cell["end_to_end"] = repeated(lambda: system.infer(arrays), left)  # noqa: B023
        if system.resident is not None:
            held = system.resident(arrays)
            cell["forward"] = repeated(held.run, left)
            if held.not_captured:
                cell["not_captured"] = held.not_captured
            held.close()
        best = cell.get("forward", cell["end_to_end"])
        cell["texts_per_second"] = batch / best["p50_ms"] * 1e3
    return cells


def timely(cells: list[Cell], least: float, left: Left, done: Done) -> Iterator[Cell]:
    """Yield cells while there is time for 4/3 of the longest so far."""
    longest = 0.0
    for cell in cells:
        done(cells)
        if left() < max(least, 1.3 * longest):
            continue
        start = time.perf_counter()
        del cell["why"]
        yield cell
        longest = max(longest, time.perf_counter() - start)
    done(cells)


def repeated(run: Callable[[], object], left: Left) -> dict[str, Any]:
    """Time calls as {"p50_ms", "p90_ms", "p99_ms", "runs"}; fewer runs when time is short."""
    times: list[float] = []
    start = time.perf_counter()
    while len(times) < ROUNDS + SETTLING:
        if len(times) > SETTLING + 5 and (time.perf_counter() - start > AT_MOST or left() < 1):
            break
        before = time.perf_counter()
        run()
        times.append((time.perf_counter() - before) * 1e3)
    kept = np.array(times[SETTLING:])
    low, high, far = np.percentile(kept, (50, 90, 99))
    return {"p50_ms": low, "p90_ms": high, "p99_ms": far, "runs": len(kept)}


def decode(
    system: Any, grid: Mapping[str, Any], judge: Judge, left: Left, done: Done
) -> list[Cell]:
    """Time a decoder.

    Returns [{"batch", "prompt", "new", "first_token_ms", "token_ms", "tokens_per_second" of all
    rows together} | as `encode`].
    """
    cells: list[Cell] = [
        {"batch": batch, "prompt": PROMPT, "new": NEW, "why": "not run: time"}
        for batch in grid["batch"]
    ]
    for cell in timely(cells, 5, left, done):
        batch = cell["batch"]
        if wrong := decoder_problem(system, judge, batch):
            cell["wrong"] = wrong
            continue
        continued(system, batch)  # settles clocks, kernels and graphs
        first, times = continued(system, batch)
        cell["first_token_ms"] = first * 1e3
        cell["token_ms"] = {
            "p50_ms": float(np.median(times)) * 1e3,
            "p90_ms": float(np.percentile(times, 90)) * 1e3,
        }
        cell["tokens_per_second"] = batch / float(np.median(times))
    return cells


def continued(system: Any, batch: int) -> tuple[float, list[float]]:
    """Generate; return seconds to the first token, and seconds of each later one."""
    given = ids(batch, PROMPT)["input_ids"]
    writer, past, times = system.start(batch, PROMPT + NEW), 0, []
    for _ in range(NEW + 1):
        arrays = continuing(given, past)
        before = time.perf_counter()
        logits = writer.step(arrays)
        past += given.shape[1]
        given = np.asarray(logits)[:, -1].argmax(-1).astype(np.int64)[:, None]
        times.append(time.perf_counter() - before)
    writer.close()
    return times[0], times[1:]


def bound(cells: list[Cell], weights: int, cache: int, memory: Mapping[str, Any]) -> str:
    """Add to each cell its share of the bandwidth limit: weights and KV caches read per step.

    weights: bytes of weights
    cache: bytes of KV cache per token and row
    memory: {"bytes_per_second", "l2_bytes"}

    Returns why the measurement cannot be right, or "".
    """
    wrong = ""
    for cell in [c for c in cells if "tokens_per_second" in c]:
        batch = cell["batch"]
        read = weights + batch * cache * (cell["prompt"] + cell["new"] // 2)
        cell["bytes_per_step"] = read
        if read <= memory["l2_bytes"]:
            cell["bound"] = "none: the data of a step fits in the L2 cache"
            continue
        limit = memory["bytes_per_second"] / read * batch
        cell["bound_tokens_per_second"] = limit
        cell["share_of_bound"] = cell["tokens_per_second"] / limit
        if cell["share_of_bound"] > 1:
            wrong = (
                f"batch {batch}: {cell['share_of_bound']:.2f} of what the memory allows; more "
                "than all of it cannot be: the bytes, the bandwidth or the clock are measured wrong"
            )
            cell["wrong"] = wrong
    return wrong
