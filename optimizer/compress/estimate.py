"""Predict the memory, disk and time of compress, from the checkpoint's headers alone.

memory = libraries + the larger of (modules outside the blocks, which make the first hidden states;
for
         a decoder only rows of the embedding) and (one block, as float and integers, small ones
         also de-quantized, with H of its widest input and the target) + streams within
         compress.memory_gb + activations of one batch in a block. Where nothing reads activations:
         libraries + the larger of (the largest weight on every thread, with its copies, and the
         integers of one block) and (the integers of head and embedding). At least: with
         quantize.allocate the model and the gradients of its outputs; with
         quantize.keep_float_auto the model twice; with a method that tunes the whole model the
         model, its values and gradients, the float hidden states of all windows, and the
         activations of one. Of several processes each needs all but its part of the streams
disk   = integers and scales, or pruned floats + folded floats, twice while they are merged +
streams,
         for resuming, and where they exceed memory (Headers of convolutional networks have no image
         sizes: their streams are taken as large as compress.memory_gb, a third of it on disk.)
time   = multiply-adds of all passes, of H and of the rounding by it, operations of the search for
         scales, and bytes written and read, at the measured speeds of this machine; texts fill half
         the sequence length, windows of a decoder all of it. Several processes share the
         passes; each rounds every block on its part of the threads
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod

from optimizer.compress.apply.weights.rounding import HELD
from optimizer.compress.methods.weights.factorization import PART
from optimizer.compress.methods.weights.rtn import list_shrinks
from optimizer.compress.processes import count_of
from optimizer.compress.segment import MEASURED
from optimizer.compress.selection import make_scheme
from optimizer.foundation.process import machine_speed
from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.foundation.process.torch_device import CONTEXT
from optimizer.harness import tasks
from optimizer.load.image_inputs import count_positions
from optimizer.model.architectures.family_record import BLOCK
from optimizer.recipe.compression.quantize import Weights
from optimizer.recipe.schema import Compression
from optimizer.store import NARROWEST, Estimate, Shapes

LIBRARIES = 440 << 20  # anonymous memory of `run` before its first stage (measured)
START = 6.0  # seconds for imports and the model's skeleton (measured)
TOGETHER = 512  # tokens whose logits are in memory together while the whole model is tuned
STACKED = 2.1  # bytes per value of head and embedding while their integers are joined
ALONE = 12  # bytes per value of a weight rounded alone: float, integers, de-quantized, differences
# Operations per value, measured as multiples of MachineSpeed.values:
NEAREST, TRIED, OF_ZERO = 50, 20, 1.5  # to nearest; per scale tried; factor of asymmetric schemes
FEEDBACK = 600  # of gptq beside its matrix products
CHECKED, STORED = 60, 200  # bytes moved per value rounded, and per byte of the state
COPIES = 4  # assumed copies of a batch's activations in a block, on a GPU
ROUNDED = 16  # assumed copies of the weights that are rounded together, on a GPU
LEARNED = 5  # values per weight that is learned: latent, integer, value, gradient, best
ATTENTION = 4  # of two tokens, per feature: scores and values, at half the speed of a product
SWEEPS = 5.5  # products of a weight with H: target 2, feedback 0.5, each sweep of refine.py 1.5


@dataclass(frozen=True)
class _ValueCounts:
    """Sizes of a model from which the cost of compress is predicted, in values unless stated
    otherwise.

    linear: all matrices inside the blocks; one: the largest of them
    blocks: number of blocks
    block: bytes of the largest block in memory, small weights also de-quantized
    outside: everything outside the blocks
    tables: quantized head and embedding; distinct: without those that share integers
    head: the head, where it is rounded by its H
    inputs: values per token of the tensors that a block's matrices read
    moments: multiply-adds per token of all H and P; feedback: multiply-adds of rounding by them
    """

    linear: int
    one: int
    blocks: int
    block: int
    block_values: int
    outside: int
    hidden: int
    widest: int
    outputs: int
    modules: int
    tables: int
    distinct: int
    head: int
    inputs: float
    moments: float
    feedback: float


def _sizes(section: Compression, shapes: Shapes) -> _ValueCounts:
    blocks: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    outside = [shape for name, shape in shapes.items() if BLOCK.search(name) is None]
    for name, shape in shapes.items():
        if block := BLOCK.search(name):
            blocks[name[: block.end()]].append(shape)
    inside = [shape for kept in blocks.values() for shape in kept if len(shape) == 2]
    hidden = max((min(shape) for shape in inside), default=0)
    table = max((prod(s) for s in outside if len(s) == 2), default=0)
    quantize = section.quantize
    stored = [w for w in (quantize.head_weights, quantize.embedding) if w != "float"]
    tied = sum(prod(s) == table for s in outside) == 1
    distinct = len(stored) if len(set(map(str, stored))) == len(stored) or not tied else 1
    by_moments = quantize.rounding.second_moments and quantize.head not in ("float", "tied")
    head = table if by_moments else 0
    # modules with one input share H: about half of those at the width of the hidden states
    share = {hidden: 0.5}
    moments = sum(
        share.get(i, 1.0) * (i * (i + PART) / 2 + section.float_reference * min(i * i, 2 * o * i))
        for o, i in inside
    )
    return _ValueCounts(
        linear=sum(map(prod, inside)),
        one=max(map(prod, inside), default=0),
        blocks=len(blocks),
        # bytes per value; wide layers are not stored de-quantized
        block=max(
            (sum((6 if prod(s) > HELD else 10) * prod(s) for s in b) for b in blocks.values()),
            default=0,
        ),
        block_values=max((sum(map(prod, b)) for b in blocks.values()), default=0),
        outside=sum(map(prod, outside)),
        hidden=hidden,
        widest=max((max(shape) for shape in inside), default=0),
        outputs=sum(shape[0] for shape in inside),
        modules=len(inside),
        tables=len(stored) * table,
        distinct=distinct * table,
        head=head,
        inputs=sum(share.get(i, 1.0) * i for _, i in inside) / max(len(blocks), 1),
        moments=moments,
        feedback=sum(share.get(i, 1.0) * i**3 + SWEEPS * o * i * i for o, i in inside)
        + SWEEPS * head * hidden,
    )


def estimate(section: Compression, shapes: Shapes, speed: MachineSpeed | None = None) -> Estimate:
    """Predict the memory, disk and seconds of compress.

    shapes: {tensor of the checkpoint: shape}
    speed: speed of the machine; None: measured
    """
    section, of = section.effective, _sizes(section, shapes)
    speed = speed or machine_speed.measure()
    quantize, calibrate = section.quantize, section.calibrate
    generates = tasks.find_task(section.task).generates
    length = calibrate.sequence_length if calibrate else 0
    if calibrate and "image" in calibrate.data.columns:
        length = count_positions(shapes)
    tokens = calibrate.samples * length if calibrate else 0
    batch = calibrate.batch_size * length if calibrate else 0
    streams = 2 if section.float_reference else 1
    stream = 4 * tokens * of.hidden * streams
    budget = section.compress.memory_bytes
    # beside the streams: one that is replaced, or the inputs of a block in the float model
    beside = stream if streams == 1 else max(2 * stream, 4 * tokens * of.inputs)
    in_memory = min(stream + beside, budget)
    if calibrate and not length:
        stream, in_memory = budget // 3, budget
    sparsity = section.sparsity
    calibrated = sparsity is not None and sparsity.record.calibrated
    with_moments = calibrated or any(m.moments for m in quantize.chosen)
    # fitting pruned values needs H and its factorization
    matrices = max(3 if sparsity is not None else 1, count_sums(section))
    statistics = 4 * matrices * of.widest**2 + 8 * of.widest * of.hidden if with_moments else 0
    inside = 12 * batch * of.widest if generates else 0
    stored = _stored(section, of)
    shares = {"": 0, "some": of.linear // 4, "all": of.linear + of.outside}
    folded = 4 * max((shares[m.folds] for m in quantize.chosen), default=0)
    full = tokens if generates else tokens / 2
    linear, outside = of.linear, of.outside
    one_pass = linear + ATTENTION * length * of.hidden * of.blocks
    repeated = count_passes(section, full)
    work = full * (repeated * one_pass + linear / max(of.blocks, 1))  # and capture.py
    if with_moments:
        work += full * of.moments + of.feedback
    each = max(0 if generates else 4 * outside, of.block + statistics)
    count, again = count_of(section), 0.0
    if count > 1:
        each = count * (LIBRARIES + each + inside)  # beside the process that started them
        again = speed.multiply(of.feedback if with_moments else 0)
        again = (count - 1) * (again + _rounding(section, of, stored, speed)) + START
    walked = each + in_memory
    if calibrate is None:
        walked = ALONE * speed.threads * of.one + of.block_values
    if quantize.allocate and calibrate:
        measured = quantize.allocate.windows * calibrate.sequence_length
        slopes = min(4 * measured * of.outputs, budget)
        walked = max(walked, 4 * (linear + outside) + slopes)
        work += (3 * measured + full + 100 * len(quantize.allocate.choices)) * linear
    if quantize.keep_float_auto and calibrate:  # the model, and its quantized modules
        walked = max(walked, 8 * (linear + outside))
        work += (of.modules + 8) * quantize.keep_float_auto.samples * length * linear
    tuning, more = _tuning(section, shapes)
    return Estimate(
        memory=int(LIBRARIES + max(walked, tuning, STACKED * of.distinct) + inside),
        disk=2 * (stored + folded) + 2 * stream,
        seconds=START + speed.multiply(work + more) + _rounding(section, of, stored, speed) + again,
        device_memory=estimate_device_memory(section, shapes),
    )


def count_sums(section: Compression) -> int:
    """Count the Hessians H that compress has in memory together, as float32: one; with partial
    sums, in float64 (awq), the sum so far and the next part's, and of several processes those that
    one measured."""
    count, partial_sums = count_of(section), section.compress.partial_sums
    if partial_sums == 1:
        return 1
    return 2 * (2 if count == 1 else 2 + -(-partial_sums // count))


def estimate_device_memory(section: Compression, shapes: Shapes) -> int:
    """Predict the bytes of GPU memory of compress, at most; 0 where the recipe says cpu.

    CUDA's context + the largest of: one block, H and the weights rounded by it, and the activations
    of one batch; with block-tuning, its learned weights, inputs and outputs too; the whole model
    with those activations, for allocate and generated text, twice for keep_float_auto; the model
    while its scales are tuned; head and embedding. Numbers of copies are assumed, and compared with
    no GPU yet.
    """
    if section.compress.chosen_device == "cpu" or section.quantize.of_kind("pass-through"):
        return 0
    section, of = section.effective, _sizes(section, shapes)
    quantize, calibrate = section.quantize, section.calibrate
    if calibrate is None:
        return CONTEXT + ALONE * max(of.one, of.distinct)
    length = calibrate.sequence_length
    if "image" in calibrate.data.columns:
        length = count_positions(shapes) or length
    whole = 4 * (of.linear + of.outside)
    scores = 0
    if not tasks.find_task(section.task).generates:  # eager attention keeps one for every pair
        scores = 8 * calibrate.batch_size * length**2 * max(1, of.hidden // NARROWEST)
    tensors = COPIES * (of.widest + of.hidden)
    inside = 4 * calibrate.batch_size * length * tensors + scores
    statistics = 0
    pruned = section.sparsity is not None
    if pruned or any(m.moments for m in quantize.chosen):
        # H in float64 (awq); and copies of the weights of modules that read one input
        statistics = 8 * (3 if pruned else 1) * of.widest**2 + 4 * ROUNDED * of.widest * of.hidden
    walked = of.block + statistics + inside
    if quantize.of_kind("block-tuning"):
        kept = calibrate.batch_size * length * (of.inputs + of.outputs / max(of.blocks, 1))
        walked += int(4 * LEARNED * of.block_values + 8 * kept)
    at_once = 0
    if quantize.allocate or calibrate.generated:
        at_once = whole + inside
    if quantize.keep_float_auto:
        at_once = max(at_once, 2 * whole + inside)
    tuning, _ = _tuning(section, shapes)
    return int(CONTEXT + max(walked, at_once, tuning, ALONE * of.distinct))


def _stored(section: Compression, of: _ValueCounts) -> int:
    """Predict the bytes of the state that compress writes: integers and scales, or pruned
    floats."""
    quantize = section.quantize
    if quantize.leaves_float:
        return 4 * of.linear
    stored = of.linear * quantize.weights.bits // 8
    stored += 4 * of.linear // (quantize.weights.group_size or 256)
    chosen = [w for w in (quantize.head_weights, quantize.embedding) if w != "float"]
    for weights in chosen:
        values = of.tables // len(chosen)
        stored += values * weights.bits // 8 + 4 * values // (weights.group_size or 256)
    return stored


def _rounding(section: Compression, of: _ValueCounts, stored: int, speed: MachineSpeed) -> float:
    """Predict the seconds that compress takes for rounding without matrix products, and for writing
    and reading the state."""
    quantize = section.quantize
    operations = 0.0 if quantize.leaves_float else of.linear * count_operations(quantize.weights)
    for weights in {str(w): w for w in (quantize.head_weights, quantize.embedding)}.values():
        if weights != "float":
            operations += min(of.tables, of.distinct) * count_operations(weights)
    if quantize.block_rounding.second_moments:
        operations += FEEDBACK * (of.linear + of.head)
    checked = CHECKED * (of.linear + of.distinct) / speed.threads
    return speed.compute(operations) + speed.move(checked + STORED * stored)


def count_operations(weights: Weights) -> float:
    """Count the operations per value of rounding to nearest, to predict compress's time; each scale
    is searched below 8 bits."""
    scheme = make_scheme(weights)
    tried = NEAREST if scheme.bits == 8 else TRIED * len(list_shrinks(scheme))
    return tried * (1 if scheme.symmetric else OF_ZERO)


def _tuning(section: Compression, shapes: Shapes) -> tuple[int, float]:
    """Predict for compress (bytes, multiply-adds) of tuning the whole model; zeros where no method
    tunes it."""
    calibrate, tuning = section.calibrate, section.quantize.model_tuning
    if calibrate is None or tuning is None:
        return 0, 0.0
    inside = [s for n, s in shapes.items() if BLOCK.search(n) and len(s) == 2]
    linear, total = sum(map(prod, inside)), sum(map(prod, shapes.values()))
    hidden = max((min(shape) for shape in inside), default=0)
    vocabulary = max((max(shape) for shape in shapes.values()), default=0)
    windows = calibrate.samples + calibrate.generated + tuning.samples + tuning.generated
    sequence_length, head = calibrate.sequence_length, vocabulary * hidden
    epochs = tuning.times_learned
    values = (8 + 1) * linear  # in float32 with a gradient, and an integer
    teacher = 4 * windows * sequence_length * hidden
    one = (
        4 * sequence_length * sum(map(sum, inside))
        + 16 * min(sequence_length, TOGETHER) * vocabulary
    )
    memory = 4 * (total + head) + values + teacher + one
    learned = windows - tuning.held_out
    passes = windows + 3 * epochs * learned + (epochs + 1) * tuning.held_out
    logits = 3 * epochs * learned + 2 * (epochs + 1) * tuning.held_out
    return memory, sequence_length * (passes * linear + logits * head)


def count_passes(section: Compression, tokens: float) -> float:
    """Count the passes of the calibration tokens through the blocks, to predict compress's time.

    tokens: number of calibration tokens, of which the first ones are measured twice
    """
    quantize, calibrate = section.quantize, section.calibrate
    if calibrate is None:
        return 0
    passes = 1 + 2 * min(1, MEASURED / max(tokens, 1)) + section.float_reference
    passes += 2 * quantize.bias_correction + (quantize.activations is not None)
    methods = sum(m.passes(quantize.options_of(m), calibrate) for m in quantize.chosen)
    pruning = section.sparsity.record.passes if section.sparsity is not None else 0.0
    # pruning and rounding share one H
    return passes + (max(methods, pruning) if methods else pruning)
