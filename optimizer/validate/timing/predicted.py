"""Predict the time that timing takes: openings of all systems, and rounds in each.

A ratio that a gate judges takes OPENINGS openings at least. Their number is doubled, again and
again, where its predicted value is so near 1 that the spread between openings covers it, until the
next look would exceed latency.max_seconds (timing/stopping_rules.py).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from optimizer import targets
from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.harness.bounds import fewest
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.model.architectures.family_record import BLOCK
from optimizer.recipe.schema import Validation
from optimizer.recipe.validate import Latency
from optimizer.store import Shapes, lowered_bytes
from optimizer.timing.stopping_rules import OPENINGS, RatioQuestion, confidence_of
from optimizer.validate.timing.cells import CANDIDATE
from optimizer.validate.timing.speed_gates import BASELINE, count_questions

ATTENTION = 4  # of two positions, per feature: scores and values, at half the speed of a product
ELEMENTWISE = 10  # operations per value that a linear module reads or returns (measured)
EAGER = 1.35  # time of torch / time of ONNX Runtime in float (measured)
PACKED = 27  # bytes moved for each byte of weights that a session packs for its kernels (measured)
OPENED = 1.1e6  # turns of MachineSpeed.interpreted: a session, beside its weights
RUNTIME, TORCH = 12e6, 100e6  # turns: a process that imports a runtime, or torch and transformers
REFERENCE = 2  # assumed size of the reference / size of a smaller model; both are in memory
WARMUP, WARMUP_GENERATION = 5, 1  # rounds (batch_timing.py, generation_timing.py)
SPREAD = 0.015
"""Standard deviation of the logarithm of a ratio over openings: that of two speeds, 3 % apart, each
as likely (docs/decisions/0059)."""


@dataclass(frozen=True)
class PredictedTimes:
    """Predicted times of one timed cell (batch, sequence) of validate's speed gates, in seconds.

    rounds: {system: one round}; the float baseline that the candidate is compared with comes first
    beside: one round of a system that is only shown; it skips rounds once it has taken as much time
        as all others
    """

    rounds: Mapping[str, float]
    beside: float = 0.0

    @property
    def ratio(self) -> float:
        """The candidate's predicted time / that of the float baseline, in one timed cell."""
        return self.rounds[CANDIDATE] / next(iter(self.rounds.values()))

    @property
    def round(self) -> float:
        """Seconds of one round of all timed systems."""
        others = sum(self.rounds.values())
        return others + min(self.beside, others)


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds and openings of validate's timing of all cells.

    least: seconds, if every gate is decided after the fewest openings
    likely: seconds, with the likely number of openings
    fewest: number of openings that belongs to `least`
    openings: number of openings that belongs to `likely`
    """

    least: float
    likely: float
    fewest: int
    openings: int

    def with_beside(self, seconds: float) -> Prediction:
        """Return this prediction plus `seconds` of other work during timing."""
        return replace(self, least=self.least + seconds, likely=self.likely + seconds)


NOTHING = Prediction(0.0, 0.0, 0, 0)


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes of an encoder that is timed, in values.

    linear: all its matrices and filters but the widest ones, which are embeddings
    wide: values that its linear modules read and return per position
    modules: number of linear modules
    hidden, blocks: width of its hidden states, and number of its blocks
    """

    linear: int
    wide: int
    modules: int
    hidden: int
    blocks: int

    @classmethod
    def of(cls, shapes: Shapes) -> EncoderSizes:
        inside = {n: s for n, s in shapes.items() if len(s) in (2, 4) and BLOCK.search(n)}
        return cls(
            linear=sum(map(math.prod, inside.values())),
            wide=sum(s[0] + s[1] for s in inside.values()),
            modules=len(inside),
            hidden=max((min(s) for s in inside.values() if len(s) == 2), default=0),
            blocks=len({number[1] for n in inside if (number := BLOCK.search(n))}),
        )

    def forward(
        self, speed: MachineSpeed, positions: float, length: float, rate: float, threads: int
    ) -> float:
        """Predict the seconds of a timed encoder's forward pass.

        positions: number of positions of all inputs
        length: number of positions of one input
        rate: multiply-adds per second of the linear modules on one thread
        threads: number of threads
        """
        attention = ATTENTION * length * self.hidden * self.blocks
        each = self.linear / rate + attention / speed.products
        each += ELEMENTWISE * self.wide / speed.values
        return positions * each / threads


def predict_batches(
    section: Validation, shapes: Shapes, model: EncoderSizes, each: int, speed: MachineSpeed
) -> Prediction:
    """Predict validate's timing of a model that answers a batch in one forward pass.

    shapes: shape of every tensor of the checkpoint
    each: positions of an image; 0 for texts
    """
    if not _is_timed(section):
        return NOTHING
    latency = section.validate_.latency
    threads = section.target.intra_op_threads or speed.threads
    integers = speed.products if section.quantize.activations is None else speed.integers
    cells = []
    lengths = [each] if each else latency.sequence
    for batch, length in itertools.product(latency.batch, lengths):
        floats, ours = (
            model.forward(speed, batch * length, length, rate, threads)
            for rate in (speed.products, integers)
        )
        cells.append(PredictedTimes({BASELINE: floats, CANDIDATE: ours}, beside=EAGER * floats))
    opening = _opening(section, shapes, speed)
    processes = speed.interpret(TORCH + 2 * RUNTIME)
    return predict(latency, cells, opening, WARMUP).with_beside(processes)


def predict_generation(section: Validation, shapes: Shapes, speed: MachineSpeed) -> Prediction:
    """Predict validate's timing of text generation. Each step reads all weights once, for all rows
    of a batch.

    shapes: shape of every tensor of the checkpoint
    """
    if not _is_timed(section):
        return NOTHING
    latency, quantize = section.validate_.latency, section.quantize
    weights = sum(map(math.prod, shapes.values()))
    stored = 4 if quantize.leaves_float else quantize.weights.bits / 8
    systems = {CANDIDATE: (weights, stored)}
    if latency.time_float:
        systems = {BASELINE: (weights * (REFERENCE if section.reduce else 1), 4), **systems}

    def time(batch: int, prompt: int, count: float, bytes_: float) -> float:
        multiplied = speed.multiply(batch * count)
        token = max(speed.move(bytes_ * count), multiplied)
        return prompt * multiplied + latency.new_tokens * token

    cells = [
        PredictedTimes({name: time(*cell, *system) for name, system in systems.items()})
        for cell in itertools.product(latency.batch, latency.sequence)
    ]
    opening = _opening(section, shapes, speed)
    processes = speed.interpret(len(systems) * RUNTIME) + opening
    predicted = predict(latency, cells, opening, WARMUP_GENERATION, latency.new_tokens - 1)
    return predicted.with_beside(processes)


def _is_timed(section: Validation) -> bool:
    """Return True for a target that is timed, if this machine has its device."""
    here = section.target.runs_on == "cpu" or describe_machine().gpu is not None
    return here and not targets.look_up(section.target.runtime).untimed


def _opening(section: Validation, shapes: Shapes, speed: MachineSpeed) -> float:
    """Predict the seconds of opening the candidate for timing, and the float model where it is
    timed."""
    packed, count = lowered_bytes(shapes, 4), 1
    if section.validate_.latency.time_float:
        packed, count = packed + 4 * sum(map(math.prod, shapes.values())), 2
    return speed.move(PACKED * packed) + speed.interpret(count * OPENED)


def predict(
    latency: Latency,
    cells: Sequence[PredictedTimes],
    opening: float,
    warmup: int,
    per_round: int = 1,
) -> Prediction:
    """Predict the seconds of validate's timing of `cells`.

    opening: seconds of closing and opening all systems
    warmup: rounds after an opening that do not count
    per_round: times of the candidate in a round, whose 99th percentile is judged
    """
    each = RatioQuestion.share_rounds(1.0, latency.iterations).rounds
    share = latency.max_seconds / max(count_questions(latency, len(cells)), 1)
    least = likely = opening
    first = count = 0
    for cell in cells:
        if len(cell.rounds) == 1:  # nothing is compared
            alone = (warmup + latency.iterations) * cell.round
            least, likely = least + alone, likely + alone
            continue
        once = opening + (warmup + each) * cell.round
        needed = OPENINGS
        if latency.must_beat_float:
            needed = _openings(cell.ratio, once, share)
        least, likely = least + OPENINGS * once - opening, likely + needed * once - opening
        first, count = first + OPENINGS, count + needed
    if latency.p99_ms is not None and cells:
        rounds = max(latency.iterations, math.ceil(fewest(99, confidence_of(1)) / per_round))
        alone = (warmup + rounds) * cells[0].rounds[CANDIDATE]
        least, likely = least + alone, likely + alone
    return Prediction(least, likely, first, count)


def _openings(ratio: float, each: float, seconds: float) -> int:
    """Return the number of openings of timed systems after which the interval of a ratio leaves out
    1: OPENINGS, doubled until then or until `seconds` are spent.

    ratio: predicted ratio
    each: seconds of one opening with its rounds
    """
    question, done, look = RatioQuestion(1.0, 1), OPENINGS, 1
    while SPREAD * question.deviations(done, confidence_of(look)) >= abs(math.log(ratio)):
        if seconds <= 0 or 2 * done * each > seconds:
            break
        done, look = 2 * done, look + 1
    return done
