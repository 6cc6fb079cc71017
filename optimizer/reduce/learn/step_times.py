"""Choose the type of products for a training by timing its steps in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from optimizer.compress.walk import products
from optimizer.compress.walk.products import ProductSettings, Seconds
from optimizer.foundation.process.launch import ALONE, Processes
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.reduce.learn.distill import TrainingTexts, choose_rows_at_once
from optimizer.reduce.learn.pair import TeacherAndStudent
from optimizer.reduce.methods.batch_order import choose_batch

Timing = Callable[[Recover, TeacherAndStudent, TrainingTexts, Processes], Seconds]


def choose_products(
    section: Recover,
    pair: TeacherAndStudent,
    learned: TrainingTexts,
    progress: Path,
    processes: Processes = ALONE,
    timing: Timing | None = None,
) -> ProductSettings:
    """Choose the float type of a training's matrix products by timing its steps in each type.

    progress: folder that keeps the choice for a resumed run
    timing: function used in place of `time_steps`; None: time_steps

    All processes call this together and get the same result.
    """
    if section.precision != "auto":
        return ProductSettings(section.precision, {})
    if pair.device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return ProductSettings("fp32", {})
    earlier = products.read_choice(progress)
    if earlier is not None:
        return earlier
    seconds = (timing or time_steps)(section, pair, learned, processes)
    (faster,) = processes.of_first([float(products.bf16_is_faster(seconds))])
    chosen = ProductSettings("bf16" if faster else "fp32", seconds)
    if processes.first:
        products.store_choice(chosen, progress, f"{section.step}: a step")
    return chosen


def time_steps(
    section: Recover, pair: TeacherAndStudent, learned: TrainingTexts, processes: Processes = ALONE
) -> Seconds:
    """Time training steps (recovery or qat) on this process's share of the first batch; return
    {precision: seconds per step}. Parameters keep their values."""
    indices = choose_batch(0, learned.lengths, section.batch_size, section.seed)
    batch = learned.batch(processes.share(indices)[: choose_rows_at_once(pair, section)])
    weights = LossWeights(hidden=0.0, attention=section.losses.attention)
    parameters = [p for p in pair.trained.values() if not p.requires_grad]
    for p in parameters:
        p.requires_grad_(True)

    def step(dtype: torch.dtype) -> None:
        with torch.enable_grad():
            each = pair.losses(batch, None, weights, section.temperature, dtype)
            torch.stack(list(each.values())).sum().backward()
        if pair.device.type == "cuda":
            torch.cuda.synchronize(pair.device)
        for p in pair.trained.values():
            p.grad = None

    seconds = products.time_in_turns(step)
    for p in parameters:
        p.requires_grad_(False)
    return seconds
