"""Predict the memory, disk and time of compress, from the checkpoint's headers alone.

memory = libraries + the larger of (modules outside the blocks, which make the first hidden states;
for
         a decoder only rows of the embedding) and (one block, as float and integers, small ones
         also de-quantized, with H of its widest input and the target) + streams within
         compress.memory_gb + activations of one batch in a block. At least: with
         quantize.allocate the model and the gradients of its outputs; with
         quantize.keep_float_auto the model twice; with a method that tunes the whole model the
         model, its values and gradients, the float hidden states of all windows, and the
         activations of one
disk   = integers and scales, or pruned floats + folded floats, twice while they are merged +
streams,
         for resuming, and where they exceed memory (Headers of convolutional networks have no image
         sizes: their streams are taken as large as compress.memory_gb, a third of it on disk.)
time   = multiply-adds of all passes at a measured rate; texts fill half the sequence length,
windows
         of a decoder all of it
"""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod

from optimizer.compress.apply.weights.rounding import HELD
from optimizer.harness import tasks
from optimizer.load.image_inputs import positions
from optimizer.recipe.schema import Compression
from optimizer.store import Estimate, Shapes

LIBRARIES = 520 << 20  # resident after importing torch, transformers and datasets (measured)
RATE = 1.5e10  # multiply-adds per second of one core, everything included (measured)
TOGETHER = 512  # tokens whose logits are in memory together while the whole model is tuned
BLOCK = re.compile(r"\.(\d+)\.")


def estimate(section: Compression, shapes: Shapes) -> Estimate:
    """Predict the memory, disk and seconds of compress.

    shapes: {tensor of the checkpoint: shape}
    """
    blocks: dict[str, int] = defaultdict(int)
    outside = linear = hidden = widest = moments = outputs = modules = 0
    for name, shape in shapes.items():
        block = BLOCK.search(name)
        if block is None:
            outside += prod(shape)
            continue
        # bytes per value; wide layers are not stored de-quantized
        blocks[name[: block.end()]] += (6 if prod(shape) > HELD else 10) * prod(shape)
        if len(shape) == 2:
            linear += prod(shape)
            modules += 1
            moments += shape[1] ** 2
            outputs += shape[0]
            hidden, widest = max(hidden, min(shape)), max(widest, *shape)
    quantize, calibrate = section.quantize, section.calibrate
    generates = tasks.task(section.task).generates
    length = calibrate.sequence_length if calibrate else 0
    if calibrate and "image" in calibrate.data.columns:
        length = positions(shapes)
    tokens = calibrate.samples * length if calibrate else 0
    batch = calibrate.batch_size * length if calibrate else 0
    streams = 2 if section.float_reference else 1
    stream = 4 * tokens * hidden * streams
    budget = section.compress.memory_bytes
    in_memory = min(2 * stream if streams == 1 else 3 * stream, budget)
    if calibrate and not length:
        stream, in_memory = budget // 3, budget
    lookup = 0 if generates else 4 * outside
    one_block = max(blocks.values(), default=0)
    sparsity = section.sparsity
    calibrated = sparsity is not None and sparsity.record.calibrated
    with_moments = calibrated or any(m.moments for m in quantize.chosen)
    matrices = (
        3 if sparsity is not None else 1
    )  # fitting pruned values needs H and its factorization
    statistics = 4 * matrices * widest**2 + 8 * widest * hidden if with_moments else 0
    inside = 12 * batch * widest if generates else 0
    stored = linear * quantize.weights.bits // 8
    stored += 4 * linear // (quantize.weights.group_size or 256)
    stored = 4 * linear if quantize.leaves_float else stored
    shares = {"": 0, "some": linear // 4, "all": linear + outside}
    folded = 4 * max((shares[m.folds] for m in quantize.chosen), default=0)
    full = tokens if generates else tokens / 2
    work = (_passes(section) * full + 40) * linear
    work += streams * full * moments if with_moments else 0
    walked = max(lookup, one_block + statistics) + in_memory
    if quantize.allocate and calibrate:
        measured = quantize.allocate.windows * calibrate.sequence_length
        slopes = min(4 * measured * outputs, budget)
        walked = max(walked, 4 * (linear + outside) + slopes)
        work += (3 * measured + full + 100 * len(quantize.allocate.choices)) * linear
    if quantize.keep_float_auto and calibrate:  # the model, and its quantized modules
        walked = max(walked, 8 * (linear + outside))
        work += (modules + 8) * quantize.keep_float_auto.samples * length * linear
    tuning, more = _tuning(section, shapes)
    return Estimate(
        memory=LIBRARIES + max(walked, tuning) + inside,
        disk=2 * (stored + folded) + 2 * stream,
        seconds=2 + (work + more) / RATE,
    )


def _tuning(section: Compression, shapes: Shapes) -> tuple[int, float]:
    """(bytes, multiply-adds) of tuning the whole model; zeros where no method tunes it."""
    calibrate, tuning = section.calibrate, section.quantize.model_tuning
    if calibrate is None or tuning is None:
        return 0, 0.0
    inside = [s for n, s in shapes.items() if BLOCK.search(n) and len(s) == 2]
    linear, total = sum(map(prod, inside)), sum(map(prod, shapes.values()))
    hidden = max((min(shape) for shape in inside), default=0)
    vocabulary = max((max(shape) for shape in shapes.values()), default=0)
    windows = calibrate.samples + calibrate.generated + tuning.samples + tuning.generated
    length, head = calibrate.sequence_length, vocabulary * hidden
    epochs = tuning.times_learned
    values = (8 + 1) * linear  # in float32 with a gradient, and an integer
    teacher = 4 * windows * length * hidden
    one = 4 * length * sum(map(sum, inside)) + 16 * min(length, TOGETHER) * vocabulary
    memory = 4 * (total + head) + values + teacher + one
    learned = windows - tuning.held_out
    passes = windows + 3 * epochs * learned + (epochs + 1) * tuning.held_out
    logits = 3 * epochs * learned + 2 * (epochs + 1) * tuning.held_out
    return memory, length * (passes * linear + logits * head)


def _passes(section: Compression) -> float:
    """Number of passes of the calibration tokens through the blocks."""
    quantize, calibrate = section.quantize, section.calibrate
    if calibrate is None:
        return 0
    passes = 3.0 + 2 * quantize.bias_correction + (quantize.activations is not None)
    methods = sum(m.passes(quantize.options_of(m), calibrate) for m in quantize.chosen)
    pruning = section.sparsity.record.passes if section.sparsity is not None else 0.0
    # pruning and rounding share one H
    return passes + (max(methods, pruning) if methods else pruning)
