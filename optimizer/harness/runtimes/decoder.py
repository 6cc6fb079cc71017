"""What a runtime must do for a text to be continued, whichever runtime it is.

    decoder = runner.decoder(contract, capacity=600)     one batch of sequences
    logits = decoder.step(arrays)                        the prompt, whole or in pieces
    logits = decoder.step(arrays)                        one token each, again and again

The arrays of a step are the model's inputs but for the cache: input_ids and, where the model takes
them, position_ids (batch, sequence) for the new tokens; attention_mask (batch, past + sequence)
for everything so far.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ..contract import Contract
from ..errors import InputError
from ..inputs.batch import Array


class Decoder(Protocol):
    """A batch of sequences and what the model remembers of them."""

    @property
    def past(self) -> int:
        """Tokens remembered per row, padding included."""

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """logits (batch, sequence, vocabulary) float32 of the new tokens, which are remembered."""


class DecoderRunner(Protocol):
    """A model that is open and can continue any number of batches, one after the other."""

    def decoder(self, contract: Contract, capacity: int = 0) -> Decoder:
        """A new, empty batch. capacity: tokens it will hold, prompt and answer; 0 if unknown."""


def pieces(arrays: Mapping[str, Array], size: int) -> Iterator[dict[str, Array]]:
    """One step's arrays as several of at most `size` tokens, which must give the same logits.

    Each piece's mask reaches to the end of the piece. Raises InputError for a size below 1.
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
    """(batch, sequence) of a step's arrays. expected: their names; past: tokens remembered, of so
    many rows.

    Raises InputError for other names, or for a shape that disagrees with input_ids or with what is
    remembered.
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
        raise InputError(f"{batch} rows continue {rows}", where="input input_ids")
    for name, array in arrays.items():
        shape = (batch, past + sequence if name == "attention_mask" else sequence)
        if array.shape != shape:
            raise InputError(
                f"shape {array.shape} was given, with {past} tokens remembered",
                where=f"input {name}",
                accepted=str(shape),
            )
    return int(batch), int(sequence)
