"""Kind of input: the functions that encode an input into a model's arrays.

encoder  = kind.open(folder, contract)                    once per model
encoded  = kind.encode(contract, encoder, inputs)         each input by itself
batch    = kind.collate(contract, encoded)                the inputs of one run
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
    """One encoded input (text, image, arrays), ready for a batch.

    encoding: result of the kind's encoder, e.g. the tokenizer's.
    size: size by which inputs are batched; of a text its tokens after truncation.
    cut: True if the input was truncated.
    unknown: number of tokens that the tokenizer does not know.
    problem: reason why the model cannot read the input; "" if it can.
    fix: remedy, as a sentence.
    skipped: number of first positions that are left out of the pooling.
    more: further parts of an input that the model reads in several.
    whole: size of the input where it may have several parts; 0: `size`.
    sides: height and width of an image before it is resized; () for other inputs.
    side: model that reads the input, of a bundle with two; "" for the bundle's own.
    """

    input: Any
    encoding: Any
    size: int = 0
    cut: bool = False
    problem: str = ""
    fix: str = ""
    unknown: int = 0
    skipped: int = 0
    more: tuple[Encoded, ...] = ()
    whole: int = 0
    sides: tuple[int, ...] = ()
    side: str = ""

    @property
    def parts(self) -> tuple[Encoded, ...]:
        """The rows of the model that hold one input; several where it is read in windows."""
        return (self, *self.more)


class Encode(Protocol):
    """Function that encodes each input by itself.

    (contract, encoder, inputs, pairs, size) -> one Encoded per input

    pairs: a second input per input, or None
    size: size to truncate to, instead of the contract's limit

    Raises InputError for inputs of another kind.
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
    """Function that joins encoded inputs to the arrays of one run.

    (contract, encoded, size) -> a Batch, padded to its largest input or, if given, to `size`
    """

    def __call__(
        self, contract: Contract, encoded: Sequence[Encoded], size: int | None = None, /
    ) -> Batch: ...


def _utf8(data: bytes, textual: bool) -> Any:
    del textual
    return data.decode()


def _open_nothing(folder: Path, contract: Contract) -> None:
    del folder, contract


def _return_one_size(contract: Contract) -> int:
    del contract
    return 1


def _return_no_extent(value: Any) -> int:
    del value
    return 0


def _draw_none(contract: Contract) -> list[Any]:
    del contract
    return []


def _first(inputs: Iterable[Any], size: int) -> Any:
    del size
    return next(iter(inputs))


def _all_real(arrays: Mapping[str, Array]) -> Array:
    return np.ones(len(next(iter(arrays.values()))), bool)


@dataclass(frozen=True)
class InputKind:
    """One kind of input, such as text or image.

    name: name in a contract.
    encode, collate: see the protocols.
    parse: line of a command or of standard input -> input; raises InputError.
    received: (element of a server request, True for a JSON string) -> input; raises ValueError.
        A request never names a file of the server.
    sent: input of a command line -> JSON string for a request; the inverse of `received`.
    open: (folder with the tokenizer, contract) -> encoder; the default returns None.
    arrays: names of the input arrays of every model of this kind.
    sections: names of contract sections that belong to this kind.
    columns: columns of a data row that hold the input and its pair.
    requested: their names in requests and lines of `predict`; () for those of `columns`.
    instead: name of a text that a request may have in place of an input; "" without.
    real: arrays of a batch -> mask of the positions that are not padding, (batch, sequence), or
        (batch) for kinds without padding.
    requires: packages that encoding needs besides numpy.
    full_sizes: (contract, encoder, inputs, pairs) -> sizes without truncation; None if never
        truncated.
    example: an input as it stands on a command line.
    size: unit of an input's size, e.g. "tokens"; "" if all inputs have one size.
    longest: contract -> maximum size of an input.
    extent: input -> approximate size before encoding, by which inputs are batched.
    neutral: contract -> default inputs for timing.
    lengthen: (inputs, size) -> one input of at least `size`, for timing.
    """

    name: str
    encode: Encode
    collate: Collate
    parse: Callable[[str], Any]
    received: Callable[[bytes, bool], Any] = _utf8
    sent: Callable[[str], str] = str
    open: Callable[[Path, Contract], Any] = _open_nothing
    arrays: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    requested: tuple[str, ...] = ()
    instead: str = ""
    real: Callable[[Mapping[str, Array]], Array] = _all_real
    requires: tuple[str, ...] = ()
    full_sizes: Callable[[Contract, Any, Sequence[Any], Sequence[Any] | None], list[int]] | None = (
        None
    )
    example: str = ""
    size: str = ""
    longest: Callable[[Contract], int] = _return_one_size
    extent: Callable[[Any], int] = _return_no_extent
    neutral: Callable[[Contract], Sequence[Any]] = _draw_none
    lengthen: Callable[[Iterable[Any], int], Any] = _first

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of this kind's input and its pair in requests."""
        return self.requested or self.columns
