"""The exported graph against the torch model it was made from, on several shapes.

An encoder is run on batches padded at the end, and padding may change nothing
(padding.py). A decoder is run on batches padded at the start: once in one piece, and once as a
prefill, a second prefill that continues it, and one token (`present` becomes `past` each time); its
cache is compared as well as its answers. A large one is run block by block, going on from a cache
that torch left. Positions that the mask leaves out do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.errors import LedgerError
from optimizer.export.padding import check_padding
from optimizer.export.pieces import begun, continued, in_blocks
from optimizer.export.reference import Arrays
from optimizer.harness.contract import Contract
from optimizer.harness.kv_cache import position_ids
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.progress import say

ANOTHER = {"fp32": 1e-3, "fp16": 1e-1}
"""Relative L2 over real tokens of any output from the float32 torch model's, beyond which the graph
is plainly another function: sixteen thousand roundoffs of float32, and a tenth, by which a wrong
frequency, mask or position changes answers. This stops hours of building early; what rounding may
do to this very model is measured, and held to, by the ledger's export hop."""

LARGE = 1 << 30
"""Bytes of weights from which a decoder is run block by block (pieces.py)."""

FLOAT_TYPES = {"fp32": "float32", "fp16": "float16"}

LONGEST = 64
"""Tokens of the longest text a decoder is checked on."""


def vocabulary(config: Mapping[str, Any], contract: Mapping[str, Any]) -> dict[str, int]:
    """How many values each drawn input may take; an image's are normal numbers."""
    sizes = {
        "input_ids": int(config.get("vocab_size", 0)),
        "token_type_ids": int(config.get("type_vocab_size", 1) or 1),
        "attention_mask": 2,
    }
    names = [i["name"] for i in contract["inputs"]]
    return {n: sizes[n] for n in names if n in sizes}


def longest_of(contract: Mapping[str, Any]) -> int:
    """The largest size of an input that the model takes; of images 1."""
    return Contract.from_json(contract).longest


def check_shapes(contract: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(batch, sequence) of the check: single, batched, and as long as the model goes.

    A decoder goes on for thousands of tokens, so it stops at LONGEST.
    """
    cache = contract.get("generation")
    if cache is not None:
        longest = min(int(cache["context"]), LONGEST)
        return [(1, longest), (3, min(17, longest - 1))]
    longest = longest_of(contract)
    if longest == 1:
        return [(1, 1), (3, 1)]
    return [(1, min(5, longest)), (2, longest), (3, min(17, longest - 1))]


def random_inputs(
    contract: Mapping[str, Any], limits: Mapping[str, int], batch: int, sequence: int
) -> Arrays:
    """Tokens drawn with a fixed seed; each row but the first has ever more padding. Images are
    drawn from the normal distribution, as normalized ones are.

    A decoder's rows are padded at the start, and its positions count real tokens.
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


def check(
    path: Path,
    contract: Mapping[str, Any],
    vocabulary: Mapping[str, int],
    precision: str,
    answer: Callable[[Arrays], Arrays],
    blocks: str,
) -> None:
    """Raise LedgerError when any output of any shape is plainly another than torch's,
    CheckpointError when an encoder's depends on padding.

    answer: what the torch model answers to inputs. blocks: the name of its list of blocks.
    """
    inputs = [random_inputs(contract, vocabulary, *shape) for shape in check_shapes(contract)]
    decodes = contract.get("generation") is not None
    beside = path.with_name(path.name + ".data")
    worst = 0.0
    if decodes and beside.is_file() and beside.stat().st_size > LARGE:
        layers = int(contract["generation"]["layers"])
        for whole in inputs:
            before = answer(begun(whole))
            batch = continued(whole, before, layers, FLOAT_TYPES[precision])
            reference = answer({k: _float32(v) for k, v in batch.items()})
            outputs = in_blocks(path, blocks, contract, batch)
            worst = max(
                worst, compare(" block by block", outputs, reference, batch, ANOTHER[precision])
            )
    else:
        expected = [answer(batch) for batch in inputs]
        with OrtRunner(path, device="cpu") as runner:
            for batch, reference in zip(inputs, expected, strict=True):
                for how, outputs in _answers(runner, contract, batch).items():
                    worst = max(worst, compare(how, outputs, reference, batch, ANOTHER[precision]))
                if not decodes:
                    values = vocabulary.get("input_ids", 0)
                    check_padding(runner, batch, values, ANOTHER[precision])
    say(f"export: graph equals torch within {worst:.1e} (relative L2) on {len(inputs)} shapes")


def _float32(array: Any) -> Any:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _answers(runner: OrtRunner, contract: Mapping[str, Any], batch: Arrays) -> dict[str, Arrays]:
    """{how it was run: outputs}."""
    if contract.get("generation") is None:
        return {"": runner.infer(batch)}
    length = batch["input_ids"].shape[1]
    cuts = sorted({max(1, length // 3), length - 1} - {0, length})
    return {
        "": in_pieces(runner, contract, batch, []),
        " in pieces": in_pieces(runner, contract, batch, cuts),
    }


def in_pieces(
    runner: OrtRunner, contract: Mapping[str, Any], batch: Arrays, ends: list[int]
) -> Arrays:
    """A decoder's answers when the text comes in pieces that end at `ends`, cache in between."""
    length = batch["input_ids"].shape[1]
    decoder = runner.decoder(Contract.from_json(contract))
    logits = []
    for begin, end in zip([0, *ends], [*ends, length], strict=True):
        piece = {n: a[:, begin:end] for n, a in batch.items() if n != "attention_mask"}
        piece["attention_mask"] = batch["attention_mask"][:, :end]
        logits.append(decoder.step(piece))
    return {**decoder.cache(), "logits": np.concatenate(logits, axis=1)}


def compare(how: str, actual: Arrays, expected: Arrays, batch: Arrays, limit: float) -> float:
    """The largest distance of any output; LedgerError when it is above `limit`."""
    worst = 0.0
    mask = batch.get("attention_mask")
    for name, value in expected.items():
        error = distance(actual[name], value, mask)
        if not error <= limit:
            shape = "x".join(map(str, next(iter(batch.values())).shape))
            raise LedgerError(
                f"{name} of the exported graph is {error:.2e} (relative L2) from the "
                f"torch model at batch x sequence {shape}{how}",
                where="export: torch -> ONNX",
                accepted=f"at most {limit:g}",
                fix="Where the target's float is fp16, set it to fp32 or bf16: some models are "
                "others in half precision. Where it is fp32, report the architecture.",
            )
        worst = max(worst, error)
    return worst


def distance(actual: Any, expected: Any, mask: Any = None) -> float:
    """Relative L2 over real tokens: positions that a (batch, sequence) mask leaves out do not
    count. (batch, sequence, width) and caches (batch, heads, sequence, width) have positions."""
    if actual.shape != expected.shape:
        return float("inf")
    if mask is not None and expected.ndim in (3, 4):
        if expected.ndim == 4:
            actual, expected = actual.swapaxes(1, 2), expected.swapaxes(1, 2)
        real = mask[:, -expected.shape[1] :].astype(bool)  # the mask reaches back over the cache
        actual, expected = actual[real], expected[real]
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(actual.astype(np.float64) - expected.astype(np.float64))) / (
        norm or 1.0
    )
