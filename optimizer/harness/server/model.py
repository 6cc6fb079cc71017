"""Run a bundle for a server: batches of encoded inputs, and raw tensors."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import AnswerError, BundleError, HarnessError, InputError, MachineError
from ..inputs.kind import Encoded
from ..inputs.text import encode_ids
from ..output import format_json
from ..tasks import build_answers, decode, encode_each
from ..tasks.answering import Answered, Predictor
from .refusals import ModelError, RequestError, TooLargeError

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..contract import Contract
    from .tensors import Array

PROMPT = "prompt_name"  # parameter of a request
TENSORS = "-tensors"  # ending of the name of a bundle's model of tensors
WIDTH = 16  # padded rows have a length that is a multiple of it
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request to a server.

    rows: maximum inputs, or rows of raw tensors
    full: rows of the longest texts that run as one batch; raw tensors of more positions run in
        several batches; None runs them in one batch
    """

    rows: int
    full: int | None = None


class ServedModel:
    """An open bundle by which a server answers batches of requests.

    limits: limits of a request
    sharing: rows that may share a batch: "alone", none; "equal", those of equal length; "padded",
        all, padded to a common length. "alone" gives the answers of `predict`; warm_up/sharing.py
        measures whether the others give the same bits
    threads: threads per batch; 0 for one per processor
    reentrant: True if several batches may run at once
    """

    def __init__(self, bundle: Bundle, limits: RequestLimits) -> None:
        self.name, self.version = str(bundle.manifest["name"]), str(bundle.manifest["version"])
        self.contract, self.task = bundle.contract, bundle.task
        self.target, self.device = str(bundle.engine["target"]), str(bundle.engine["device"])
        self.sharing, self.limits = "alone", limits
        self.predictor: Predictor = bundle.predictor
        self.threads = bundle.threads
        self.reentrant = bundle.reentrant

    def encode(
        self, inputs: Sequence[Any], pairs: Sequence[Any] | None, prompt: object = None
    ) -> list[Encoded]:
        """Encode each input of a request as a row; a tuple holds the token ids of a text. Raises
        RequestError for an input that cannot be read.

        prompt: name of the prompt before each text; None: the model's default
        """
        if not 0 < len(inputs) <= self.limits.rows:
            raise TooLargeError(f"{len(inputs)} inputs; accepted: 1 to {self.limits.rows}")
        contract = self._with_prompt(prompt)
        try:
            if isinstance(inputs[0], tuple):
                return encode_ids(contract, self.predictor.encoder, inputs)
            rows = encode_each(contract, self.predictor.encoder, inputs, pairs)
        except InputError as e:
            raise RequestError(f"{e.where}: {e.problem}") from None
        for i, row in enumerate(rows):
            if row.problem:
                raise RequestError(f"input {i}: {row.problem}. {row.fix}")
        count = sum(len(row.parts) for row in rows)
        if count > self.limits.rows:
            raise TooLargeError(
                f"the model would read these inputs in {count} rows; accepted: up to "
                f"{self.limits.rows}. Send fewer or shorter ones"
            )
        return rows

    def merge(self, inputs: Sequence[Encoded], answers: Sequence[Any]) -> list[Any]:
        """Combine for the client the answers to the rows of inputs that were split into several
        rows, in order.

        An input with a failed row gets the exception of that row.
        """
        left, merged = iter(answers), list[Any]()
        for one in inputs:
            parts = [next(left) for _ in one.parts]
            failed = next((part for part in parts if isinstance(part, Exception)), None)
            merged.append(failed or self.task.merge(self.contract, parts))
        return merged

    def _with_prompt(self, name: object) -> Contract:
        """Return the contract with the prompt of a request. Raises RequestError for an unknown
        one."""
        if name is None:
            return self.contract
        try:
            return self.contract.with_prompt(name if isinstance(name, str) else "")
        except InputError as e:
            accepted = e.accepted or "none"
            raise RequestError(f"unknown {PROMPT}; accepted: {accepted}", param=PROMPT) from None

    def bucket(self, row: Encoded) -> tuple[Hashable, int]:
        """Return (key that requests' rows of one batch have in common, predicted length of that
        batch in tokens)."""
        if self.sharing == "padded" and (self.task.inputs.size or row.side):
            width = -(-row.size // WIDTH) * WIDTH
            return (row.side, width), width
        return (object() if self.sharing == "alone" else (row.side, row.size)), row.size

    def run(self, rows: Sequence[Encoded]) -> list[Answer | Exception]:
        """Run rows of requests as one batch: an answer per row, in order, or the exception of a
        failed row."""
        batch = self.task.inputs.collate(self.contract, rows)
        batch.encoder = self.predictor.encoder
        try:
            values = decode(self.contract, self.predictor.infer(batch), batch)
        except AnswerError as e:
            if len(rows) == 1:
                return [ModelError(f"{e.where}: {e.problem}")]
            return [answer for row in rows for answer in self.run([row])]
        return list(build_answers(self.contract, values, batch))

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run a request's raw inputs {name: array}; return the outputs by name. Raises RequestError
        for inputs that the contract does not accept."""
        self._check_rows(arrays)
        rows, most = len(next(iter(arrays.values()))), self._rows_at_once(arrays)
        try:
            parts = [
                self.predictor.infer({n: a[i : i + most] for n, a in arrays.items()})
                for i in range(0, rows, most)
            ]
            if len(parts) == 1:
                return dict(parts[0])
            return {n: np.concatenate([part[n] for part in parts]) for n in parts[0]}
        except InputError as e:
            raise RequestError(str(e)) from None
        except (BundleError, MachineError):  # a token outside of the vocabulary, or too long a row
            raise RequestError("the model cannot be run on these tensors") from None

    def _rows_at_once(self, arrays: Mapping[str, Array]) -> int:
        """Return the maximum rows of a request's raw inputs per run, with at most the positions of
        a full batch."""
        tokenizer, full, rows = self.contract.tokenizer, self.limits.full, self.limits.rows
        specs = (*self.contract.inputs, *self.contract.outputs)
        if tokenizer is None or full is None or any(s.axes[:1] != ("batch",) for s in specs):
            return rows
        lengths = [
            size
            for spec in self.contract.inputs
            for axis, size in zip(spec.axes, arrays[spec.name].shape, strict=True)
            if axis == "sequence"
        ]
        return full * tokenizer.max_length // max(lengths, default=1)

    def _check_rows(self, arrays: Mapping[str, Array]) -> None:
        rows = len(next(iter(arrays.values())))
        if not 0 < rows <= self.limits.rows:
            raise TooLargeError(f"{rows} rows; accepted: 1 to {self.limits.rows}")

    def check_inputs(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Check a request's raw inputs against the contract; return a copy of the mapping.

        Raises RequestError for another name, type or shape, NaN or infinity, and rows longer than
        the model reads.
        """
        specs = {spec.name: spec for spec in self.contract.inputs}
        for problem, names in (
            ("unknown", set(inputs) - set(specs)),
            ("missing", set(specs) - set(inputs)),
        ):
            if names:
                raise RequestError(f"{problem} input; accepted: {', '.join(specs)}")
        longest = None if self.contract.tokenizer is None else self.contract.tokenizer.max_length
        axes: dict[str, int] = {}
        for name, spec in specs.items():
            array = inputs[name]
            if str(array.dtype) != spec.dtype:
                raise RequestError(f"input '{name}' is {array.dtype}; accepted: {spec.dtype}")
            if array.ndim != len(spec.axes) or not array.size:
                raise RequestError(f"input '{name}' has shape {array.shape}; accepted: {spec.axes}")
            for size, axis in zip(array.shape, spec.axes, strict=True):
                expected = axis if isinstance(axis, int) else axes.setdefault(axis, size)
                if size != expected or (axis == "sequence" and longest and size > longest):
                    raise RequestError(
                        f"input '{name}' has shape {array.shape}; accepted: {spec.axes}, "
                        f"alike in all inputs"
                        + (f", of at most {longest} positions" if longest else "")
                    )
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise RequestError(f"input '{name}' holds NaN or infinity")
        self._check_rows(inputs)
        return dict(inputs)


def as_json(answer: Answer, engine: str) -> bytes:
    """Encode the server's answer as `predict --json` prints it. engine: name of the engine."""
    return format_json(Answered("", answer), engine).encode()


def client_failure(error: Exception) -> RequestError:
    """Return the error that a client gets for a failed batch.

    It is `error` itself if that is a RequestError; else it names only the class of `error`.
    """
    if isinstance(error, RequestError):
        return error
    kind = type(error).__name__ if isinstance(error, HarnessError) else "unexpected failure"
    return ModelError(f"the model failed ({kind})")


def list_numbers(answer: Any) -> list[Any]:
    """Flatten a server's answer, to compare it with another: return its keys, numbers and strings
    in order."""
    if isinstance(answer, Mapping):
        return [n for key, value in answer.items() for n in (key, *list_numbers(value))]
    if isinstance(answer, list | tuple):
        return [n for value in answer for n in list_numbers(value)]
    return [answer]


def difference(one: Answer, other: Answer) -> float:
    """Compare a server's answers, in a batch and alone: return the largest absolute difference
    between the floats of two.

    0 if the answers are equal; infinite if anything else in them differs.
    """
    if one == other and json.dumps(one) == json.dumps(other):  # -0.0 is 0.0 elsewhere
        return 0.0
    pairs = list(zip(list_numbers(one), list_numbers(other), strict=False))
    if len(list_numbers(one)) != len(list_numbers(other)):
        return float("inf")
    largest = 0.0
    for a, b in pairs:
        if isinstance(a, float) and isinstance(b, float):
            largest = max(largest, abs(a - b), float(np.finfo(np.float32).tiny) * (a != b))
        elif a != b:
            return float("inf")
    return largest
