"""What a kind of input is: the functions between what a model is asked and the arrays it takes.

encoder  = kind.open(folder, contract)                    once per model
encoded  = kind.encode(contract, encoder, inputs)         each input by itself
batch    = kind.collate(contract, encoded)                those that run together
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .batch import Array, Batch

if TYPE_CHECKING:
    from ..contract import Contract


@dataclass(frozen=True)
class Encoded:
    """One input, ready for a batch.

    encoding: what it became. size: inputs of like size share a batch; of a text its tokens, as
    many as the model reads. cut: whether something of it was cut off. problem: why the model
    cannot read it; "" when it can. fix: what to do about the problem.
    """

    input: Any
    encoding: Any
    size: int = 0
    cut: bool = False
    problem: str = ""
    fix: str = ""


class Encode(Protocol):
    """(contract, encoder, inputs, pairs, size) -> an Encoded per input.

    pairs: a second input per input, or None for none. size: cut to exactly this many, instead of
    to the contract's limit. Raises InputError for what is no input of this kind.
    """

    def __call__(
        self,
        contract: Contract,
        encoder: Any,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None = None,
        size: int | None = None,
        /,
    ) -> list[Encoded]: ...


class Collate(Protocol):
    """(contract, encoded, size) -> one batch, padded to the largest of them, or to `size`."""

    def __call__(
        self, contract: Contract, encoded: Sequence[Encoded], size: int | None = None, /
    ) -> Batch: ...


def _utf8(data: bytes, textual: bool) -> Any:
    del textual
    return data.decode()


def _nothing(folder: Path, contract: Contract) -> None:
    del folder, contract


def _one_size(contract: Contract) -> int:
    del contract
    return 1


def _no_extent(value: Any) -> int:
    del value
    return 0


def _none(contract: Contract) -> list[Any]:
    del contract
    return []


def _first(inputs: Iterable[Any], size: int) -> Any:
    del size
    return next(iter(inputs))


def _all_real(arrays: Mapping[str, Array]) -> Array:
    return np.ones(len(next(iter(arrays.values()))), bool)


@dataclass(frozen=True)
class InputKind:
    """One kind of input. name: as a contract says it.

    encode, collate: see the protocols. parse: an input from one line of text (of a command, or of
    standard input); raises InputError for another. received: an input from an element of a request
    to a server, and whether that was a string of JSON; raises ValueError for another. It never
    names a file of the server's. sent: such a string of JSON, from an input of a command line.
    open: what encode needs of a bundle's tokenizer folder, given once; nothing by default. arrays:
    those that every model of this kind takes. sections: of a contract, those that belong to this
    kind. columns: of a row of data, those that hold the input and its pair. requires: packages that
    encoding needs besides numpy. real: of a batch's arrays, which positions are not padding, bool
    (batch, sequence); (batch) where nothing ever is. whole_sizes: (encoder, inputs, pairs) -> the
    sizes had nothing been cut; None where nothing is ever cut.

    example: what one may be on a command line. size: what an input's size counts; "" where all
    have one. longest: the largest size the model
    takes. extent: how large an input is before it is encoded, so that alike ones can share a
    batch. For timing: neutral: inputs that any model can be timed on; lengthened: one input of
    `size`, or of more, made of several.
    """

    name: str
    encode: Encode
    collate: Collate
    parse: Callable[[str], Any]
    received: Callable[[bytes, bool], Any] = _utf8
    sent: Callable[[str], str] = str
    open: Callable[[Path, Contract], Any] = _nothing
    arrays: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    real: Callable[[Mapping[str, Array]], Array] = _all_real
    requires: tuple[str, ...] = ()
    whole_sizes: Callable[[Any, Sequence[Any], Sequence[Any] | None], list[int]] | None = None
    example: str = ""
    size: str = ""
    longest: Callable[[Contract], int] = _one_size
    extent: Callable[[Any], int] = _no_extent
    neutral: Callable[[Contract], Sequence[Any]] = _none
    lengthened: Callable[[Iterable[Any], int], Any] = _first
