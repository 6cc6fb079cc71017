"""The estimate follows the work of the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.compress.estimate import START, estimate
from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.compression.quantize import Allocate
from optimizer.recipe.schema import (
    Activations,
    Calibrate,
    Compress,
    Compression,
    DataSpec,
    Quantize,
    Weights,
)
from optimizer.store import Estimate
from tests.compress import decoders
from tests.compress.checkpoints import W8A8, contents, section

SPEED = MachineSpeed(1e6, 1e6, 1e6, 1e6, 1e6, 1e6, threads=2)
TWICE = MachineSpeed(2e6, 2e6, 2e6, 2e6, 2e6, 2e6, threads=2)


def predicted(
    loaded: Path, layers: int = 2, speed: MachineSpeed = SPEED, **options: Any
) -> Estimate:
    tensors = open_checkpoint(loaded).tensors
    shapes = {n: t.shape for n, t in tensors.items() if ".layer.1." not in n}
    for i in range(1, layers):
        shapes |= {n.replace(".0.", f".{i}."): s for n, s in shapes.items() if ".layer.0." in n}
    needed = {n: tuple(s) for n, s in shapes.items()}
    return estimate(section(loaded, **options), needed, speed)


def test_depth_costs_disk_and_time_but_no_memory(loaded: Path) -> None:
    shallow, deep = predicted(loaded, 2, **W8A8), predicted(loaded, 20, **W8A8)
    assert deep.memory == shallow.memory
    assert deep.disk > shallow.disk
    assert deep.seconds > shallow.seconds


def test_calibration_costs_time(loaded: Path) -> None:
    assert predicted(loaded, 20, **W8A8).seconds > predicted(loaded, 20, data=False).seconds


def test_processes_cost_memory_and_share_the_passes_alone(llama: Path) -> None:
    tensors = open_checkpoint(llama).tensors
    shapes = {n: tuple(t.shape) for n, t in tensors.items()}
    whole = decoders.section(llama, methods=["gptq"])
    one, two = (
        estimate(whole.model_copy(update={"compress": c}), shapes, SPEED)
        for c in (Compress(partial_sums=2), Compress(partial_sums=2, processes=2))
    )
    assert two.memory > 2 * one.memory
    assert one.seconds < two.seconds < 2 * one.seconds
    assert two.disk == one.disk


def test_texts_that_no_method_reads_cost_nothing(loaded: Path) -> None:
    weights = Weights(bits=4, granularity="group", group_size=16)
    assert predicted(loaded, weights=weights) == predicted(loaded, data=False, weights=weights)


def test_a_machine_twice_as_fast_needs_half_the_time(loaded: Path) -> None:
    slow, fast = (predicted(loaded, 20, speed=s, **W8A8).seconds for s in (SPEED, TWICE))
    assert slow - START == pytest.approx(2 * (fast - START))


def test_the_disk_predicted_is_enough(loaded: Path, static: Path) -> None:
    needed = sum(map(len, contents(static).values()))
    most = predicted(loaded, 2, method="smoothquant", bias_correction=True, **W8A8).disk
    assert needed < most


def test_choosing_bits_needs_the_whole_model(loaded: Path) -> None:
    weights = Weights(bits=4, granularity="group", group_size=16)
    plain = {"method": "gptq", "weights": weights}
    chosen = {**plain, "allocate": Allocate(average_bits=5)}
    more = predicted(loaded, 40, **chosen).memory - predicted(loaded, 20, **chosen).memory
    assert more > predicted(loaded, 40, **plain).memory - predicted(loaded, 20, **plain).memory
    assert predicted(loaded, 20, **chosen).seconds > predicted(loaded, 20, **plain).seconds


def test_images_of_convolutions_are_predicted_as_all_that_may_be_held() -> None:
    images = DataSpec(source="imagefolder", columns={"image": "image"})
    shapes = {"stages.0.layers.0.convolution.weight": (8, 4, 3, 3)}

    def memory(gigabytes: float) -> float:
        section = Compression(
            calibrate=Calibrate(data=images, samples=8),
            quantize=Quantize(activations=Activations()),
            task="image-classification",
            compress=Compress(memory_gb=gigabytes),
        )
        return estimate(section, shapes).memory

    assert memory(3.0) - memory(1.0) == 2e9


def test_tuning_the_whole_model_costs_memory_and_time_with_what_it_learns_from(
    llama: Path,
) -> None:
    tensors = open_checkpoint(llama).tensors
    shapes = {
        name.replace(".layers.1.", f".layers.{i}."): tuple(t.shape)
        for name, t in tensors.items()
        for i in range(1, 200 if ".layers.1." in name else 2)
    }

    def needed(*methods: str, **options: Any) -> Estimate:
        given = {"scale_tuning": options} if options else {}
        return estimate(decoders.section(llama, methods=["gptq", *methods], **given), shapes)

    plain = needed("scale_tuning")
    longer, more = (needed("scale_tuning", **given) for given in ({"epochs": 4}, {"samples": 40}))
    assert needed().memory < plain.memory == longer.memory
    assert plain.memory < more.memory
    assert needed().seconds < plain.seconds < min(longer.seconds, more.seconds)
