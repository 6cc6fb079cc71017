"""How suite.py times a system; which there are is in systems.py.

Encoder, for each batch and sequence: `end_to_end`, arrays of the host to arrays of the host, and,
where a system can be asked, `forward`, with inputs that are on the device already; each waited for.
Rounds until the clock has settled are thrown away. Decoder: a prompt, then one token after the
other, chosen on the host (greedy), the cache staying where the system keeps it.
No cell is timed whose answers are wrong (check.py), and each is handed to `done` when it is
finished, the most telling first: a run that is stopped keeps what it had.
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
    """[{"batch", "sequence", "end_to_end", "forward", "texts_per_second"} | {..., "why"} |
    {..., "wrong": answers beyond the tolerance}]."""
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
    """Each cell that there is time for: what the longest so far took, and a third more."""
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
    """{"p50_ms", "p90_ms", "p99_ms", "runs"}; fewer runs when time is short."""
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
    """[{"batch", "prompt", "new", "first_token_ms", "token_ms", and tokens_per_second of all rows
    together} | as `encode`]."""
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
    """Seconds to the first token, and of each one after."""
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
    """Beside tokens per second, what memory allows: a token reads every weight once and the cache
    of each row. weights: bytes. cache: bytes per token remembered. memory: {"bytes_per_second",
    "l2_bytes"}. Returns why the measurement cannot be right, or ""."""
    wrong = ""
    for cell in [c for c in cells if "tokens_per_second" in c]:
        batch = cell["batch"]
        read = weights + batch * cache * (cell["prompt"] + cell["new"] // 2)
        cell["bytes_per_step"] = read
        if read <= memory["l2_bytes"]:
            cell["bound"] = "none: what a step reads fits in the L2 cache"
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
