"""Interface for generation that every runtime implements: steps with a KV cache.

    decoder = runner.decoder(contract, capacity=600)     one batch of sequences
    logits = decoder.step(arrays)                        prefill, at once or in pieces
    logits = decoder.step(arrays)                        decode, one token per row
    logits = decoder.last(arrays)                        as `step`, of the newest tokens only

The arrays of a step are the model's inputs without the KV cache: input_ids and, if the model takes
them, position_ids (batch, sequence) of the new tokens; attention_mask (batch, past + sequence) of
all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..contract import Contract
from ..errors import InputError
from ..inputs.batch import Array


class Decoder(Protocol):
    """One generation of texts by a runtime's engine: a batch of sequences with its own KV cache."""

    @property
    def past(self) -> int:
        """Tokens per row in the KV cache, padding included."""

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """Run the engine on new tokens, added to the KV cache; return their logits (batch,
        sequence, vocabulary), float32.

        Raises InputError for arrays that contradict the contract or the KV cache.
        """

    def last(self, arrays: Mapping[str, Array]) -> Array:
        """Run the engine on new tokens as `step`; return the logits (batch, vocabulary) of each
        row's newest."""


class _StepDecoder(Protocol):
    """Interface of a runtime's decoder that returns the logits of all new tokens."""

    def step(self, arrays: Mapping[str, Array]) -> Array: ...


class LastOfStep:
    """Mixin of a runtime's decoder that implements `last` by `step`, for models that always compute
    the logits of all tokens."""

    def last(self: _StepDecoder, arrays: Mapping[str, Array]) -> Array:
        """Run the engine on new tokens as `step`; return the logits (batch, vocabulary) of each
        row's newest."""
        logits: Array = self.step(arrays)[:, -1]
        return logits


class DecoderRunner(Protocol):
    """Interface of a model that a runtime opened and that generates text.

    A new decoder starts a generation with its own KV cache. One decoder is in use at a time.
    """

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        """Return a decoder with an empty KV cache.

        capacity: expected tokens per row, prompt and answer; 0 if unknown.
        """


def pieces(arrays: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    """Split the arrays of one step of a decoder into steps of at most `size` tokens per row.

    arrays: inputs of the step without the KV cache, as for `Decoder.step`
    size: maximum new tokens per row of a piece

    Yields the arrays of each piece; its attention_mask ends with its last token. The logits of all
    pieces together are those of the one step. Raises InputError for a size below 1.
    """
    if size < 1:
        raise InputError(f"{size} was given", where="size of a piece", accepted="1 or more")
    length = arrays["input_ids"].shape[1]
    past = arrays["attention_mask"].shape[1] - length
    for start in range(0, length, size):
        stop = min(start + size, length)
        piece = {n: a[:, start:stop] for n, a in arrays.items() if n != "attention_mask"}
        yield {**piece, "attention_mask": arrays["attention_mask"][:, : past + stop]}


def check_step(
    arrays: Mapping[str, Array], expected: Sequence[str], past: int, rows: int
) -> tuple[int, int]:
    """Check the arrays of a decoder's step and return (rows, new tokens per row).

    expected: names of the arrays.
    past: tokens per row in the KV cache.
    rows: rows in the KV cache.
    Raises InputError for other names, or for a shape that contradicts input_ids or the KV cache.
    """
    if set(arrays) != set(expected):
        raise InputError(
            f"{', '.join(sorted(arrays))} were given", where="step", accepted=", ".join(expected)
        )
    ids = arrays["input_ids"]
    if ids.ndim != 2 or not ids.size:
        raise InputError(f"shape {ids.shape} was given", where="input input_ids", accepted="2 axes")
    batch, sequence = ids.shape
    if past and batch != rows:
        raise InputError(
            f"{batch} rows were given, with {rows} rows in the KV cache", where="input input_ids"
        )
    for name, array in arrays.items():
        shape = (batch, past + sequence if name == "attention_mask" else sequence)
        if array.shape != shape:
            raise InputError(
                f"shape {array.shape} was given, with {past} tokens in the KV cache",
                where=f"input {name}",
                accepted=str(shape),
            )
    return int(batch), int(sequence)
