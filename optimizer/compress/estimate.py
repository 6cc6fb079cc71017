"""What compress is predicted to need, from the checkpoint's headers alone.

memory = the libraries + the larger of (what lies outside the blocks, read once to make the first
         hidden states; of a decoder the rows that are looked up) and (one block, as float and
         codes, where it is small also de-quantized, with the second moments of its widest input and
         what a weight should become) + the streams, as far as
         compress.memory_gb lets them be held + what one batch makes inside a block; with
         quantize.allocate not less than the whole model and what its outputs get; with
         quantize.keep_float_auto not less than the whole model twice; with what tunes the whole
         model not less than that, its values and gradients, the float model's answers to all of
         its windows and what one of them keeps
disk   = codes and scales, or floats that are only pruned + folded floats, twice while they are put
         together + the streams, kept to go on after a kill and where memory has no room for them
         (A network of convolutions has its images' sizes in no header: its streams are taken as
         large as compress.memory_gb lets them be held, a third of which goes to disk.)
time   = multiply-adds of all passes at a measured rate, texts filling half the sequence length
         (windows of a decoder fill all of it)
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
TOGETHER = 512  # tokens whose logits exist at once while the whole model is tuned
BLOCK = re.compile(r"\.(\d+)\.")


def estimate(section: Compression, shapes: Shapes) -> Estimate:
    """shapes: of every tensor of the checkpoint."""
    blocks: dict[str, int] = defaultdict(int)
    outside = linear = hidden = widest = moments = outputs = modules = 0
    for name, shape in shapes.items():
        block = BLOCK.search(name)
        if block is None:
            outside += prod(shape)
            continue
        # bytes of a value: a wide layer's are not held de-quantized
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
    budget = int(section.compress.memory_gb * 1e9)
    in_memory = min(2 * stream if streams == 1 else 3 * stream, budget)
    if calibrate and not length:
        stream, in_memory = budget // 3, budget
    lookup = 0 if generates else 4 * outside
    one_block = max(blocks.values(), default=0)
    sparsity = section.sparsity
    looks = sparsity is not None and sparsity.record.calibrated
    with_moments = looks or any(m.moments for m in quantize.chosen)
    matrices = 3 if sparsity is not None else 1  # a mask's best values need H beside its factor
    statistics = 4 * matrices * widest**2 + 8 * widest * hidden if with_moments else 0
    inside = 12 * batch * widest if generates else 0
    codes = linear * quantize.weights.bits // 8 + 4 * linear // (quantize.weights.group_size or 256)
    codes = 4 * linear if quantize.leaves_float else codes
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
    if quantize.keep_float_auto and calibrate:  # the model, and stand-ins of its modules
        walked = max(walked, 8 * (linear + outside))
        work += (modules + 8) * quantize.keep_float_auto.samples * length * linear
    tuning, more = _tuning(section, shapes)
    return Estimate(
        memory=LIBRARIES + max(walked, tuning) + inside,
        disk=2 * (codes + folded) + 2 * stream,
        seconds=2 + (work + more) / RATE,
    )


def _tuning(section: Compression, shapes: Shapes) -> tuple[int, float]:
    """Bytes, and multiply-adds, of tuning the whole model (methods/weights/scale_tuning.py), if it
    is."""
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
    answers = 4 * windows * length * hidden
    one = 4 * length * sum(map(sum, inside)) + 16 * min(length, TOGETHER) * vocabulary
    memory = 4 * (total + head) + values + answers + one
    learned = windows - tuning.held_out
    passes = windows + 3 * epochs * learned + (epochs + 1) * tuning.held_out
    logits = 3 * epochs * learned + 2 * (epochs + 1) * tuning.held_out
    return memory, length * (passes * linear + logits * head)


def _passes(section: Compression) -> float:
    """How often the calibration tokens go through the blocks."""
    quantize, calibrate = section.quantize, section.calibrate
    if calibrate is None:
        return 0
    passes = 3.0 + 2 * quantize.bias_correction + (quantize.activations is not None)
    methods = sum(m.passes(quantize.options_of(m), calibrate) for m in quantize.chosen)
    pruning = section.sparsity.record.passes if section.sparsity is not None else 0.0
    # one statistic serves both
    return passes + (max(methods, pruning) if methods else pruning)
