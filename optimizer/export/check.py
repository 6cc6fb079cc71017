"""Compare the exported graph with its torch model on several shapes.

An encoder runs on batches padded at the end, and padding may change nothing (padding.py). A decoder
runs on batches padded at the start: once in one piece, and once as a prefill, a second prefill and
one decoded token (`present` becomes `past` each time). Its KV cache is compared as well as its
outputs. A large decoder runs block by block, from a KV cache that torch computed; of one whose
blocks are copies (passes/repeat.py), the first TRACED blocks and the head run, and cutting the
graph proves that every other block continues from the one before it. Masked positions do not
count.

Limits are measured in the same run: the torch model runs several times on the same inputs, each
float operation rounded at random to the graph's float type. The graph may lie as far from torch as
these runs lie from each other (optimizer/foundation/rounding/tolerance.py). The check fails before
hours of building; the ledger's export hop compares the same graph piece by piece, on real texts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from optimizer.export.padding import check_padding
from optimizer.export.passes.repeat import TRACED, shorten
from optimizer.export.pieces import run_blocks, take_first_tokens, take_later_tokens
from optimizer.export.reference import Arrays
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.progress import say
from optimizer.foundation.rounding.random_rounding import (
    Arithmetic,
    RandomRounding,
    angles_in_float32,
)
from optimizer.foundation.rounding.tolerance import RUNS, UNIT, lengths, upper_bound
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.kv_cache import position_ids
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.model.architectures.families import is_language_model

LARGE = 1 << 28
"""Bytes of weights from which a decoder is run block by block (pieces.py)."""

FLOAT_TYPES = {"fp32": "float32", "fp16": "float16"}

LONGEST, LONGEST_ENCODER = 64, 1024
"""Maximum tokens per text in the export check: LONGEST for decoders with a KV cache,
LONGEST_ENCODER for other models, so that the end of a table of up to 1024 learned positions is
reached."""


def list_vocabulary_sizes(config: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, int]:
    """List the inputs to draw for the check of an exported graph, {token input: number of values it
    may take}; images have no entry.

    config: content of config.json
    """
    sizes = {
        "input_ids": int(config.get("vocab_size", 0)),
        "token_type_ids": int(config.get("type_vocab_size", 1) or 1),
        "attention_mask": 2,
    }
    names = [i["name"] for i in contract["inputs"]]
    return {n: sizes[n] for n in names if n in sizes}


def longest_of(contract: Mapping[str, Any]) -> int:
    """Return the maximum tokens that the exported model takes; 1 for images."""
    return tasks.longest(Contract.from_json(contract))


def check_shapes(contract: Mapping[str, Any]) -> list[tuple[int, int]]:
    """List the (batch, sequence) pairs at which an exported graph is checked: a single text, a
    batch, and the longest text (up to LONGEST tokens for a decoder, LONGEST_ENCODER for others)."""
    cache = contract.get("generation")
    if cache is not None:
        longest = min(int(cache["context"]), LONGEST)
        return [(1, longest), (3, min(17, longest - 1))]
    longest = min(longest_of(contract), LONGEST_ENCODER)
    if longest == 1:
        return [(1, 1), (3, 1)]
    return [(1, min(5, longest)), (2, longest), (3, min(17, longest - 1))]


def draw_inputs(
    contract: Mapping[str, Any], limits: Mapping[str, int], batch: int, sequence: int
) -> Arrays:
    """Draw random inputs for the check of an exported graph, one batch: {input: array}, with a seed
    fixed by the shape.

    Tokens are int64 (batch, sequence), each row with more padding than the row before, at the start
    for a decoder, whose position_ids count real tokens. Images are normally distributed float32.

    limits: result of list_vocabulary_sizes
    """
    rng = np.random.default_rng(batch * 1000 + sequence)
    fixed = [i for i in contract["inputs"] if i["dtype"] == "float32"]
    if fixed:
        return {
            i["name"]: rng.standard_normal((batch, *i["axes"][1:])).astype(np.float32)
            for i in fixed
        }
    lengths = [max(1, sequence - row * sequence // (batch + 1)) for row in range(batch)]
    real = np.arange(sequence)[None] < np.array(lengths)[:, None]
    if contract.get("generation") is not None:
        real = real[:, ::-1]
    pads = {
        "input_ids": int(contract["tokenizer"]["pad_id"]),
        "token_type_ids": int(contract["tokenizer"].get("pad_type_id", 0)),
    }
    arrays = {}
    for name, limit in limits.items():
        drawn = rng.integers(0, limit, (batch, sequence))
        if name == "input_ids":
            drawn = np.where(drawn == pads[name], (drawn + 1) % limit, drawn)
        arrays[name] = np.where(real, drawn, pads.get(name, 0)).astype(np.int64)
    if "attention_mask" in arrays:
        arrays["attention_mask"] = real.astype(np.int64)
    if any(i["name"] == "position_ids" for i in contract["inputs"]):
        arrays["position_ids"] = position_ids(real, sequence)
    return arrays


@dataclass
class Scatter:
    """Effect of rounding on each output of a model that is exported, measured between its correct
    runs.

    limits: {output: relative L2 by which an example of the graph may differ from torch}
    usual: {output: mean square of a value}, the scale to which tolerance.lengths relates errors
    """

    limits: Mapping[str, float]
    usual: Mapping[str, float]


@dataclass(frozen=True)
class Asked:
    """A batch with torch's outputs, the reference that an exported graph's outputs are compared
    with.

    batch: {input: array}
    expected: {output: array} of torch in float32
    runs: RUNS times {output: array}, each with other random rounding to the graph's float type
    mask: (batch, sequence), 1 for real tokens; None where nothing is padded
    """

    batch: Arrays
    expected: Arrays
    runs: Sequence[Arrays]
    mask: Any = None

    def examples(self, array: Any) -> list[Any]:
        """Split `array`, an output of the exported graph for this batch, into one array per
        example, without padding."""
        return split_examples(array, self.mask)


def ask(
    batch: Arrays,
    precision: str,
    answer: Callable[[Arrays], Arrays],
    model: nn.Module,
    *,
    padded: bool,
) -> Asked:
    """Run the torch model on a batch, as the reference of the exported graph: once in float32, and
    RUNS times with randomly rounded operations.

    precision: float type of the graph, "fp32" or "fp16", to which the runs are rounded
    answer: function from inputs to the outputs of `model` in torch float32
    padded: True where an input attention_mask hides tokens
    """
    runs = []
    for seed in range(RUNS):
        arithmetic = Arithmetic(unit=UNIT[precision], operands=True)
        mode = RandomRounding(arithmetic, seed)
        with angles_in_float32(model, mode), mode:
            runs.append(answer(batch))
    return Asked(batch, answer(batch), runs, batch.get("attention_mask") if padded else None)


def measure_scatter(batches: Sequence[Asked], precision: str) -> Scatter:
    """Measure, as limits of the exported graph, the scatter of every output over all batches: the
    mean square of its values, and an upper bound of the relative L2 between two runs of one
    example."""
    limits, usual = dict[str, float](), dict[str, float]()
    for name in batches[0].expected:
        values = [e for one in batches for e in one.examples(one.expected[name])]
        squares = sum(float(np.square(v, dtype=np.float64).sum()) for v in values)
        usual[name] = squares / max(sum(v.size for v in values), 1)
        runs = [[e for a in batches for e in a.examples(a.runs[k][name])] for k in range(RUNS)]
        apart = [
            length
            for i, one in enumerate(runs)
            for other in runs[i + 1 :]
            for length in lengths(list(zip(one, other, strict=True)), usual[name])
        ]
        # a KV cache is compared whole and in pieces, and every row with padding and without
        looks = 3 * len(values) * len(batches[0].expected)
        independent = len(values) * (RUNS // 2)
        limits[name] = upper_bound(apart, independent, looks, UNIT[precision])
    return Scatter(limits, usual)


def check(
    path: Path,
    contract: Mapping[str, Any],
    inputs: Sequence[Arrays],
    vocabulary: Mapping[str, int],
    precision: str,
    answer: Callable[[Arrays], Arrays],
    blocks: str,
    model: nn.Module,
    grown: bool = False,
) -> None:
    """Check the exported graph at `path`: raise LedgerError where an output is further from torch's
    than rounding explains, CheckpointError where an output of an encoder depends on padding.

    inputs: batches, such as random_inputs draws
    vocabulary: result of list_vocabulary_sizes
    precision: float type of the graph, "fp32" or "fp16"
    answer: function from inputs to the outputs of `model` in torch
    blocks: name of the model's list of blocks
    grown: True where later blocks of the graph are copies of the first
    """
    decodes = contract.get("generation") is not None
    beside = path.with_name(path.name + ".data")
    large = decodes and beside.is_file() and beside.stat().st_size > LARGE
    count = int(contract["generation"]["layers"]) if large else 0
    layers = min(TRACED, count) if grown else count
    if layers < count:
        inputs = inputs[-1:]  # of several rows with padding
    task, config = tasks.find_task(contract["task"]), getattr(model, "config", None)
    padded = bool(task.inputs.size)
    with shorten(model, blocks, layers) if layers < count else nullcontext():
        if large:
            befores = [answer(take_first_tokens(whole)) for whole in inputs]
            inputs = [
                take_later_tokens(whole, before, layers, FLOAT_TYPES[precision])
                for whole, before in zip(inputs, befores, strict=True)
            ]
        batches = [
            ask(
                {k: _float32(v) for k, v in batch.items()},
                *(precision, answer, model),
                padded=padded,
            )
            for batch in inputs
        ]
    apart, worst = measure_scatter(batches, precision), 0.0
    by_pads = config is not None and task.classifies and not task.per_position
    skips = by_pads and is_language_model(config)
    values = None if skips else vocabulary.get("input_ids", 0)
    if large:
        for batch, one in zip(inputs, batches, strict=True):
            outputs = run_blocks(path, blocks, contract, batch, layers)
            worst = max(worst, compare(" block by block", outputs, one, apart, precision))
    else:
        with OrtRunner(path, device="cpu") as runner:
            for one in batches:
                for how, outputs in _answers(runner, contract, one.batch).items():
                    worst = max(worst, compare(how, outputs, one, apart, precision))
                if padded and not decodes:
                    check_padding(runner, one.batch, values, apart.limits, apart.usual)
    of = f" of its first {layers} blocks, the others being copies" if layers < count else ""
    rows = sum(len(next(iter(batch.values()))) for batch in inputs)
    say(
        f"export: graph{of} equals torch on {rows} rows: an example is off by at most "
        f"{worst:.2g} of what rounding in {precision} may do"
    )


def _float32(array: Any) -> Any:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _answers(runner: OrtRunner, contract: Mapping[str, Any], batch: Arrays) -> dict[str, Arrays]:
    """Run the exported graph on a batch. Returns {end of a message's sentence: outputs}."""
    if contract.get("generation") is None:
        return {"": runner.infer(batch)}
    length = batch["input_ids"].shape[1]
    cuts = sorted({max(1, length // 3), length - 1} - {0, length})
    return {
        "": run_in_pieces(runner, contract, batch, []),
        " in pieces": run_in_pieces(runner, contract, batch, cuts),
    }


def run_in_pieces(
    runner: OrtRunner, contract: Mapping[str, Any], batch: Arrays, ends: list[int]
) -> Arrays:
    """Run an exported decoder on consecutive pieces of a batch, each continuing from the KV cache
    before it.

    Returns the logits of all pieces, joined along the sequence, and the last KV cache.

    ends: index of the token behind each piece
    """
    length = batch["input_ids"].shape[1]
    decoder = runner.decoder(Contract.from_json(contract))
    logits = []
    for begin, end in zip([0, *ends], [*ends, length], strict=True):
        piece = {n: a[:, begin:end] for n, a in batch.items() if n != "attention_mask"}
        piece["attention_mask"] = batch["attention_mask"][:, :end]
        logits.append(decoder.step(piece))
    return {**decoder.cache(), "logits": np.concatenate(logits, axis=1)}


def compare(how: str, actual: Arrays, one: Asked, apart: Scatter, precision: str) -> float:
    """Compare the exported graph's outputs with torch's; return the largest ratio of distance to
    limit.

    how: end of the message, which says how the graph was run
    actual: {output: array} of the graph
    Raises LedgerError for a ratio above 1, and where torch's outputs are not finite.
    """
    worst = 0.0
    for name, value in one.expected.items():
        whole = all(np.isfinite(e).all() for e in one.examples(value))
        if not whole or not np.isfinite(apart.limits[name]):
            raise LedgerError(
                f"{name} of the torch model is infinite or not a number on random inputs"
                + ("" if not whole else f" once values are rounded to {precision}"),
                where="export: torch -> ONNX",
                accepted="finite numbers, without which no graph can be compared",
                fix="Look for weights that are NaN or infinite, and for an overflow."
                if not whole
                else "Set the target's float to fp32.",
            )
        far, limit = (
            measure_distance(actual[name], value, one.mask, apart.usual[name]),
            apart.limits[name],
        )
        if not far <= limit:
            shape = "x".join(map(str, next(iter(one.batch.values())).shape))
            raise LedgerError(
                f"{name} of the exported graph: an example is {far:.2e} (relative L2) from the "
                f"torch model at batch x sequence {shape}{how}",
                where="export: torch -> ONNX",
                accepted=f"at most {limit:.2e}, what rounding in {precision} does to this model on "
                "the same inputs",
                fix=_advice(precision),
            )
        worst = max(worst, far / limit)
    return worst


def _advice(precision: str) -> str:
    report = "the graph is another function of the model: report its architecture"
    if precision == "fp32":
        return f"More than rounding: {report}."
    return (
        f"Set the target's float to fp32: where that passes, the model leaves the range of "
        f"{precision}; where it is refused as well, {report}."
    )


def measure_distance(
    actual: Any, expected: Any, mask: Any = None, usual: float | None = None
) -> float:
    """Measure how far the exported graph's output is from torch's: the maximum relative L2 of an
    example; infinity for arrays of different shapes.

    mask: (batch, sequence), 0 for positions to leave out; None compares all
    usual: mean square of a value, by the rule of tolerance.lengths; None for the examples' own
    """
    if actual.shape != expected.shape:
        return float("inf")
    pairs = zip(split_examples(actual, mask), split_examples(expected, mask), strict=True)
    return max(lengths(list(pairs), usual), default=0.0)


def split_examples(array: Any, mask: Any = None) -> list[Any]:
    """Split an output of the exported graph into one array per row, without the positions that a
    (batch, sequence) mask hides.

    Positions are an axis of outputs (batch, sequence, width) and of KV caches (batch, heads,
    sequence, width).
    """
    if mask is None or array.ndim not in (3, 4):
        return list(array)
    if array.ndim == 4:
        array = array.swapaxes(1, 2)
    real = mask[:, -array.shape[1] :].astype(bool)  # the mask covers the KV cache too
    return [row[keep] for row, keep in zip(array, real, strict=True)]
