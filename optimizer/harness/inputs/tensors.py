"""Rows of named arrays, for a model whose inputs are tensors.

A row has an array for each input of the contract, of the input's axes after the first; several rows
are stacked. Sizes are fixed, so nothing is padded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bounds import LINE
from ..errors import InputError
from ..trust.verify import parse as parse_json
from .batch import Array, Batch
from .kind import Encoded, InputKind

if TYPE_CHECKING:
    from ..contract import Contract, TensorSpec

ONLY = ""
"""Name of a row's array where the model has one input, whose own name a row need not repeat."""
Prepare = Callable[[Mapping[str, Array]], Mapping[str, Array]]
FILES = (".npz", ".npy")
TIMED = 8  # default rows for timing
LARGEST = 1 << 30  # maximum bytes of a file


class TensorRow(Mapping[str, Any]):
    """Arrays of one input row by name. Rows with the same types, shapes and values are equal.

    sha256: digest of names, types, shapes and values
    """

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}
        digest = hashlib.sha256()
        for name, array in sorted(self._arrays.items()):
            digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        self.sha256 = digest.hexdigest()

    def __getitem__(self, name: str) -> Any:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorRow) and self.sha256 == other.sha256


class InputRow(TensorRow):
    """Arrays of the model's inputs, which no preparation of a task changes."""


def encode(
    contract: Contract,
    _encoder: None,
    rows: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    size: int | None = None,
    prepare: Prepare | None = None,
) -> list[Encoded]:
    """Convert each input row to arrays of the contract's types; one that does not fit gets a
    `problem`.

    rows: {input: array or nested list}, or the array alone for a model of one input.
    size: ignored, because all rows have one size.
    prepare: as of `prepare_by`; None: rows are the model's inputs.
    Raises InputError without rows and for pairs.
    """
    del size
    if not len(rows):
        raise InputError("no row was given", where="arrays", accepted="one row or more")
    if pairs is not None and any(pair is not None for pair in pairs):
        raise InputError("pairs of rows are not supported", where="pairs")
    return [_encoded(contract, row, prepare) for row in rows]


def _encoded(contract: Contract, row: Any, prepare: Prepare | None) -> Encoded:
    names = [spec.name for spec in contract.inputs]
    values = row if isinstance(row, Mapping) else {ONLY: row}
    if prepare is not None and not isinstance(row, InputRow):
        try:
            values = dict(prepare({name: np.asarray(value) for name, value in values.items()}))
        except Exception as e:  # code of another package
            at = extract_tb(e.__traceback__)[-1]
            problem = f"{type(e).__name__}: {str(e)[:120]} ({Path(at.filename).name}:{at.lineno})"
            return Encoded(row, None, size=1, problem=problem)
    if len(names) == 1 and set(values) == {ONLY}:
        values = {names[0]: values[ONLY]}
    fix = f"Give {', '.join(f'{s.name} {_describe_form(s)}' for s in contract.inputs)}."
    for problem, some in (
        ("missing", set(names) - set(values)),
        ("unknown", set(values) - {*names}),
    ):
        if some:
            words = f"{problem} input {', '.join(sorted(map(str, some)))[:200]}"
            return Encoded(row, None, size=1, problem=words, fix=fix)
    arrays = {}
    for spec in contract.inputs:
        array, problem = _array(values[spec.name], spec)
        if problem:
            return Encoded(row, None, size=1, problem=f"{spec.name} {problem}", fix=fix)
        arrays[spec.name] = array
    return Encoded(row, arrays, size=1)


def _describe_form(spec: TensorSpec) -> str:
    return f"({spec.dtype} {list(spec.axes[1:])})"


def _array(value: Any, spec: TensorSpec) -> tuple[Array, str]:
    """Convert a value to an input array of one row.

    Returns (array, ""), or (an empty array, reason why the value does not fit `spec`).
    """
    nothing = np.empty(0)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        return nothing, "is not an array: its lists have different lengths"
    shape, dtype = tuple(spec.axes[1:]), np.dtype(spec.dtype)
    if array.dtype.kind not in "biuf":
        return nothing, f"holds {array.dtype}, not numbers"
    if array.shape != shape:
        return nothing, f"has shape {list(array.shape)}, not {list(shape)}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return nothing, "holds NaN or infinity"
    if dtype.kind in "iu" and array.dtype.kind == "f":
        return nothing, "holds fractions, not whole numbers"
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(dtype)
    whole = dtype.kind in "iu"
    if (converted != array).any() if whole else not np.isfinite(converted).all():
        return nothing, f"holds numbers beyond {dtype}"
    return converted, ""


def collate(contract: Contract, encoded: Sequence[Encoded], size: int | None = None) -> Batch:
    """Stack input rows of raw arrays to one batch, {input: (batch, ...)}."""
    del size
    arrays = {s.name: np.stack([e.encoding[s.name] for e in encoded]) for s in contract.inputs}
    return Batch(arrays, [e.input for e in encoded], [e.encoding for e in encoded])


def parse(text: str) -> Any:
    """Read an input row of arrays from a line of the command.

    text: JSON, {input: nested list} or a nested list; or the path of an .npz file with an array per
        input, or of an .npy file

    Raises InputError for other text.
    """
    if text.endswith(FILES):
        return read_file(Path(text))
    try:
        return _check_values(parse_json(text.encode()))
    except (ValueError, RecursionError) as e:
        raise InputError(
            f"it is not JSON ({str(e)[:80]})",
            where=text[:60],
            accepted='{"INPUT": [numbers, ...], ...}, or the path of an .npz file',
        ) from None


def _check_values(document: Any) -> Any:
    if not isinstance(document, dict | list | int | float) or isinstance(document, bool):
        raise ValueError("it is not an object of arrays")
    return document


def read_file(file: Path) -> Any:
    """Read input arrays from a file: those of an .npz file by name, or the array of an .npy file.

    Raises InputError if it cannot be read.
    """
    try:
        if file.stat().st_size > LARGEST:
            raise InputError(f"it has more than {LARGEST:,} bytes", where=str(file))
        content = np.load(file, allow_pickle=False)
        if isinstance(content, np.ndarray):
            return content
        with content:
            return {name: content[name] for name in content.files}
    except (OSError, ValueError, EOFError, KeyError) as e:
        raise InputError(
            f"the arrays cannot be read ({str(e)[:120]})", where=str(file), accepted=".npz, .npy"
        ) from None


def read_received(data: bytes, textual: bool) -> Any:
    """Read the arrays of an input row from a request's JSON."""
    del textual
    if len(data) > LINE:
        raise ValueError(f"more than {LINE} bytes")
    return _check_values(parse_json(data))


def encode_sent(text: str) -> str:
    """Return the input row of a command line as JSON, the inverse of `read_received`.

    Raises InputError as `parse` does.
    """
    row = parse(text)
    if isinstance(row, Mapping):
        return json.dumps({name: np.asarray(array).tolist() for name, array in row.items()})
    return json.dumps(np.asarray(row).tolist())


def draw_noise(contract: Contract) -> list[InputRow]:
    """Return input rows of noise for timing: floats normally distributed, whole numbers 0 or 1."""
    rng = np.random.default_rng(0)

    def array(spec: TensorSpec) -> Array:
        shape = tuple(int(axis) for axis in spec.axes[1:])
        if np.dtype(spec.dtype).kind == "f":
            return rng.standard_normal(shape).astype(spec.dtype)
        return rng.integers(0, 2, shape).astype(spec.dtype)

    return [InputRow({s.name: array(s) for s in contract.inputs}) for _ in range(TIMED)]


TENSORS = InputKind(
    name="row",
    encode=encode,
    collate=collate,
    parse=parse,
    received=read_received,
    sent=encode_sent,
    columns=("arrays",),
    example="row.npz",
    neutral=draw_noise,
)


def prepare_by(prepare: Prepare) -> InputKind:
    """Return the kind of input whose rows a function of a task turns into the model's inputs.

    prepare: arrays of a row as the data or a request name them (an array without a name under ONLY)
        -> {input: array}; an exception is the row's problem
    """
    return replace(TENSORS, encode=partial(encode, prepare=prepare))
