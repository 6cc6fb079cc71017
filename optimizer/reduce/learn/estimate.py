"""Estimate the memory, disk and time of recover and qat from the checkpoints' headers alone.

memory = libraries + teacher and student as float32 + gradient, Adam's two moments and the best
         values of the trained weights + activations that one batch keeps for its gradient, and the
         teacher's hidden states; for text-generation the logits; for losses.attention the
         probabilities of every head
disk   = checkpoint of training, twice while one replaces the other + the trained model
time   = multiply-adds of the steps at a measured rate: forward of both, backward of one; with those
         of the trials where the learning rate is searched
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from optimizer.foundation.process.torch_device import CONTEXT
from optimizer.harness import tasks
from optimizer.model.architectures.family_record import BLOCK
from optimizer.recipe.recover import Learning
from optimizer.recipe.schema import QuantizationAware, Recovery, Task
from optimizer.reduce.learn.distill import LOGITS
from optimizer.reduce.learn.rate_search import count_trial_steps
from optimizer.reduce.learn.training import MEASURED
from optimizer.store import NARROWEST, Estimate, Shapes

LIBRARIES = 520 << 20  # resident after importing torch, transformers and datasets (measured)
QUANTIZED = 3  # values per weight: in steps, rounded, de-quantized
RATE = 1.5e10  # multiply-adds per second of one core, everything included (measured)
TRIED = 5  # usual number of rates (benchmarks/encoders/qat.py)
KEPT = 5  # values per query and key: of both models and of the loss (measured on MiniLM)


def estimate_recovery(section: Recovery, shapes: Shapes) -> Estimate:
    """Predict memory and time of stage recover. shapes: shape of every tensor of the teacher, an
    upper bound for the student."""
    return _estimate(section.recover, section.task, shapes)


def estimate_training(section: QuantizationAware, shapes: Shapes) -> Estimate:
    """Estimate qat as `estimate_recovery` does, with the quantized weights that each step also
    computes and keeps."""
    plain = _estimate(section.qat, section.task, shapes)
    linear = sum(prod(s) for n, s in shapes.items() if BLOCK.search(n) and len(s) == 2)
    more = 4 * QUANTIZED * linear
    on_gpu = plain.device_memory and plain.device_memory + more
    return replace(plain, memory=plain.memory + more, device_memory=on_gpu)


def _estimate(recover: Learning, task: Task, shapes: Shapes) -> Estimate:
    """Predict memory and time of a training.

    recover: section of the recipe
    shapes: shape of every tensor of the teacher, an upper bound for the student
    """
    total = sum(map(prod, shapes.values()))
    inside = {name: shape for name, shape in shapes.items() if BLOCK.search(name)}
    trained = sum(map(prod, inside.values()))
    linear = [shape for shape in inside.values() if len(shape) == 2]
    blocks = len({BLOCK.findall(name)[0] for name in inside}) or 1
    hidden = max((min(shape) for shape in linear), default=0)
    generates = tasks.find_task(task).generates
    rows = recover.batch_size
    logits = head = 0
    if generates:
        vocabulary = max((max(shape) for shape in shapes.values()), default=1)
        rows = min(rows, max(1, LOGITS // (vocabulary * recover.sequence_length)))
        head = vocabulary * hidden
        logits = 4 * 4 * rows * recover.sequence_length * vocabulary
    tokens = rows * recover.sequence_length
    # Each linear keeps its input, and the operator after it the output.
    kept = 4 * tokens * sum(map(sum, linear))
    states = 4 * tokens * hidden * 2 * (blocks + 1)
    if recover.losses.attention:
        heads = max(1, hidden // NARROWEST)
        states += 4 * KEPT * tokens * recover.sequence_length * heads * blocks
    memory = LIBRARIES + 4 * (2 * total + 4 * trained) + kept + states + logits
    full = recover.batch_size * recover.sequence_length * (1 if generates else 0.5)
    trials = TRIED if recover.learning_rate == "auto" else 0
    steps = recover.steps + trials * count_trial_steps(recover.steps)
    judged = (MEASURED + trials) * recover.held_out / recover.batch_size
    work = full * (sum(map(prod, linear)) + head) * (4 * steps + 2 * judged)
    work += recover.generated * recover.sequence_length * (sum(map(prod, linear)) + head)
    seconds = 5 + work / RATE
    if recover.max_hours is not None:
        seconds = min(seconds, recover.max_hours * 3600)
    on_gpu = memory - LIBRARIES + CONTEXT if recover.device != "cpu" else 0
    return Estimate(memory, 2 * 16 * trained + 4 * total, seconds, on_gpu)
