"""What two models multiply in while one learns from the other: float32, or bf16 where it is faster.

An instruction for bf16 says little: AMX is several times faster than float32, AVX-512's dot
products take twice its time in some builds of torch. So, where the recipe leaves it open, steps of
this very pair are timed in both, in turn, and bf16 is taken where its slowest was faster than
float32's fastest. progress/products.json keeps what was taken: a killed run goes on in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimizer import atomic
from optimizer.load.checkpoint import read_json
from optimizer.progress import say
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.reduce.distill import Texts, rows_at_once
from optimizer.reduce.methods.batch_order import batch_of
from optimizer.reduce.pair import Pair
from optimizer.reduce.processes import ALONE, Processes

FILE = "products.json"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Timing = Callable[[Recover, Pair, Texts, Processes], dict[str, list[float]]]
TIMED = 3  # steps in each, after one that warms up


@dataclass(frozen=True)
class Products:
    """precision: fp32 or bf16. seconds: {precision: of each step that was timed}; empty where the
    recipe or the device left no choice."""

    precision: str
    seconds: Mapping[str, list[float]]

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.precision]


def taken(
    section: Recover,
    pair: Pair,
    learned: Texts,
    progress: Path,
    processes: Processes = ALONE,
    timing: Timing | None = None,
) -> Products:
    """What the training whose checkpoints are in `progress` multiplies in; the same in all
    processes, which call this together. timing: in place of `timed`."""
    if section.precision != "auto":
        return Products(section.precision, {})
    if pair.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return Products("fp32", {})
    if (progress / FILE).is_file():
        return Products(**read_json(progress / FILE))
    seconds = (timing or timed)(section, pair, learned, processes)
    (faster,) = processes.of_first([float(max(seconds["bf16"]) < min(seconds["fp32"]))])
    products = Products("bf16" if faster else "fp32", seconds)
    if processes.first:
        atomic.write(progress / FILE, json.dumps(asdict(products)).encode())
        each = {name: min(values) for name, values in seconds.items()}
        say(
            f"{section.step}: a step takes {each['fp32']:.2f} s in fp32 and {each['bf16']:.2f} s "
            f"in bf16; products are in {products.precision}"
        )
    return products


def timed(
    section: Recover, pair: Pair, learned: Texts, processes: Processes = ALONE
) -> dict[str, list[float]]:
    """{precision: seconds of each step}, of this process's share of the first batch. No parameter
    changes."""
    indices = batch_of(0, learned.lengths, section.batch_size, section.seed)
    batch = learned.batch(processes.share(indices)[: rows_at_once(pair, section)])
    weights = LossWeights(hidden=0.0, attention=section.losses.attention)
    parameters = list(pair.trained.values())
    before = [p.requires_grad for p in parameters]
    for p in parameters:
        p.requires_grad_(True)
    seconds: dict[str, list[float]] = {name: [] for name in TYPES}
    for _ in range(1 + TIMED):
        for name, dtype in TYPES.items():
            start = time.perf_counter()
            with torch.enable_grad():
                each = pair.losses(batch, None, weights, section.temperature, dtype)
                torch.stack(list(each.values())).sum().backward()
            if pair.device.type == "cuda":
                torch.cuda.synchronize(pair.device)
            seconds[name].append(time.perf_counter() - start)
            for p in parameters:
                p.grad = None
    for p, needed in zip(parameters, before, strict=True):
        p.requires_grad_(needed)
    return {name: values[1:] for name, values in seconds.items()}
