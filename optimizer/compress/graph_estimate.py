"""Predict the memory, disk and time of compress for an ONNX file, from the needs of its parts.

memory = libraries + the largest part: its weights, as float and integers, with H of its widest
         input, and the tensors of one batch + streams within compress.memory_gb + tensors that are
         computed before the parts; with quantize.keep_float_auto or allocate the whole model; if
         nothing reads activations, the largest weight on every thread, with its copies. At least
         what the check of the file takes, which `run` repeats before any stage
disk   = integers and scales, twice while they are merged + streams, for resuming and beyond memory
time   = passes of the rows, at the measured speed of the torch model on one thread, with rounding
         of what modules read, H, the rounding by it, operations of the search for scales, and bytes
         written and read
"""

from __future__ import annotations

from math import prod

from optimizer.compress import predicted
from optimizer.compress.apply.weights.rounding import HELD
from optimizer.compress.estimate import (
    ALONE,
    CHECKED,
    FEEDBACK,
    START,
    STORED,
    SWEEPS,
    count_operations,
    count_passes,
    count_sums,
)
from optimizer.compress.methods.weights.factorization import PART
from optimizer.foundation.process import machine_speed
from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.foundation.state import weight_name
from optimizer.model.graph.needs import GraphShapes, PartNeeds
from optimizer.recipe.schema import Compression
from optimizer.store import CompressedShapes, Estimate

MOVED = 40  # bytes moved per byte that modules read and give in a pass: integers, ranges (measured)
IN_FLIGHT = 3  # copies of the largest tensors while one is quantized and its integers are summed


def estimate(
    section: Compression, shapes: GraphShapes, speed: MachineSpeed | None = None
) -> Estimate:
    """Predict memory, disk and time of compress for a model that is an ONNX graph.

    speed: speed of the machine; None: measured
    """
    section, speed = section.effective, speed or machine_speed.measure()
    quantize, calibrate = section.quantize, section.calibrate
    compressed = predicted.predict_shapes(section, shapes)
    integers = compressed.integers if isinstance(compressed, CompressedShapes) else {}
    linear = sum(prod(shape) for shape, _ in integers.values())
    whole = 4 * sum(map(prod, shapes.values()))
    stored = int(sum(prod(shape) * width for shape, width in integers.values()))
    with_moments = any(m.moments for m in quantize.chosen)
    blocks = [_weights(part, shapes, integers) for part in shapes.parts]
    rounding = count_operations(quantize.weights) * linear
    rounding += FEEDBACK * linear if quantize.block_rounding.second_moments else 0
    seconds = START + speed.compute(rounding)
    seconds += speed.move(CHECKED * linear / speed.threads + STORED * stored)
    if calibrate is None:
        widest = max((prod(shape) for shape, _ in integers.values()), default=0)
        walked = ALONE * speed.threads * widest + max(blocks, default=0)
        return Estimate(shapes.libraries + max(walked, shapes.opened), 2 * stored, seconds)
    rows, batch = calibrate.samples, min(calibrate.batch_size, calibrate.samples)
    streams = 2 if section.float_reference else 1
    stream = streams * rows * max(p.enters for p in shapes.parts)
    carried = {name: size for part in shapes.parts for name, size in part.carried.items()}
    in_memory = min(2 * stream, section.compress.memory_bytes) + rows * sum(carried.values())
    statistics = count_sums(section) * _moments(integers) if with_moments else 0
    walked = max(
        block + IN_FLIGHT * batch * part.live + statistics
        for block, part in zip(blocks, shapes.parts, strict=True)
    )
    positions = sum(p.positions[m] for p in shapes.parts for m in p.positions)
    tokens = rows * positions / max(1, sum(len(p.positions) for p in shapes.parts))
    one_pass = rows * sum(p.seconds for p in shapes.parts) / speed.threads
    repeated = count_passes(section, tokens)
    edges = rows * sum(p.edges for p in shapes.parts)
    seconds += repeated * (one_pass + speed.move(MOVED * edges))
    if with_moments:
        seconds += speed.multiply(_products(section, shapes, integers, rows))
    if quantize.keep_float_auto:
        walked = max(walked, 2 * whole)
        again = (len(integers) + 8) * quantize.keep_float_auto.samples / max(rows, 1)
        seconds += again * one_pass
    if quantize.allocate:
        walked = max(walked, whole + min(4 * rows * positions, section.compress.memory_bytes))
        seconds += (3 + len(quantize.allocate.choices)) * one_pass
    return Estimate(
        memory=shapes.libraries + max(walked + in_memory, shapes.opened),
        disk=2 * stored + 2 * stream,
        seconds=seconds,
    )


Integers = dict[str, tuple[tuple[int, ...], float]]


def _weights(part: PartNeeds, shapes: GraphShapes, integers: Integers) -> int:
    """Predict the bytes that compress needs for a part's parameters: float, those that are
    quantized also as integers, and small ones of these de-quantized."""
    values = {name: prod(shapes[name]) for name in part.parameters}
    return sum(
        size * ((6 if size > HELD else 10) if name in integers else 4)
        for name, size in values.items()
    )


def _moments(integers: Integers) -> int:
    """Predict for compress the bytes of the largest Hessian H, and of the weights that are rounded
    by it."""
    sides = [(s[0], prod(s[1:])) for s, _ in integers.values()]
    return max((4 * i * i + 8 * o * i for o, i in sides), default=0)


def _products(section: Compression, shapes: GraphShapes, integers: Integers, rows: int) -> float:
    """Predict for compress the multiply-adds of all Hessians H and cross moments P, and of rounding
    by them."""
    count = 0.0
    for part in shapes.parts:
        for module, positions in part.positions.items():
            if weight_name(module) in integers:
                shape = shapes[weight_name(module)]
                o, i = shape[0], prod(shape[1:])
                cross = section.float_reference * min(i * i, 2 * o * i)
                count += rows * positions * (i * (i + PART) / 2 + cross)
                count += i**3 + SWEEPS * o * i * i
    return count
