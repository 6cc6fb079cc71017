"""Answer batches of requests inside another server: requests -> columns of answers.

Called by the model that `optimize deploy --to triton` writes. Every answer has the bits of
`predict` for its input alone: rows are batched where warm_up/warm_up.py measured that this changes
nothing, and texts are generated one after another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..bounds import BATCH
from ..bundle.bundle import Bundle
from ..errors import InputError
from ..generate import Options
from ..inputs.kind import Encoded
from ..process.closing import Closing
from ..tasks.text_generation import NO_PAIRS
from .inference import build_column, read_inputs
from .model import PROMPT, Answer, RequestLimits, ServedModel, client_failure
from .refusals import RequestError
from .scheduling.decoding import ADAPTER
from .tensors import Array
from .text_model import client_error
from .warm_up.warm_up import warm_up


@dataclass(frozen=True)
class EmbeddedRequest:
    """Request that another server (Triton) passes to Embedded.

    inputs: arrays of bytes by column, `text` and optionally `text_pair`, or `image`
    outputs: names of the columns to return
    options: options of text generation; `prompt_name` of a sentence embedding
    """

    inputs: Mapping[str, Array]
    outputs: Sequence[str]
    options: Mapping[str, Any] = field(default_factory=dict)


class Embedded(Closing):
    """An open bundle that answers batches of requests inside another server.

    rows: maximum rows per batch
    cache: cache folder, as for Bundle
    sharing: "equal" if rows of equal length share a batch, "alone" if each row runs by itself;
        measured when it opens

    Raises the errors of Bundle, and BundleError for a model that does not answer.
    """

    def __init__(self, folder: Path, rows: int, cache: Path | None = None) -> None:
        self._bundle, self._rows = Bundle(folder, cache=cache), rows
        self._tensors = dict(self._bundle.task.tensors(self._bundle.contract))
        self._model: ServedModel | None = None
        self.sharing = "alone"
        if not self._bundle.task.generates:
            self._model = ServedModel(self._bundle, RequestLimits(BATCH))
            warm_up(self._model, rows, "exact")
            self.sharing = self._model.sharing

    def answer(self, requests: Sequence[EmbeddedRequest]) -> list[dict[str, Array] | RequestError]:
        """Answer another server's requests: per request, in order, {column: array with one element
        per input}.

        A request that cannot be answered gets its RequestError instead.
        """
        if self._model is None:
            return [self._columns(r, self._generate(r)) for r in requests]
        encoded = [self._encode(self._model, r) for r in requests]
        inputs = [row for e in encoded if not isinstance(e, RequestError) for row in e]
        rows = [part for row in inputs for part in row.parts]
        answers = self._run(self._model, rows)
        merged = iter(self._model.merge(inputs, [answers[id(row)] for row in rows]))
        return [
            self._columns(r, e if isinstance(e, RequestError) else [next(merged) for _ in e])
            for r, e in zip(requests, encoded, strict=True)
        ]

    def close(self) -> None:
        self._bundle.close()

    def _encode(self, model: ServedModel, request: EmbeddedRequest) -> list[Encoded] | RequestError:
        try:
            _check(request)
            inputs, pairs = read_inputs(model.task.inputs, request.inputs, (), BATCH)
            return model.encode(inputs, pairs, request.options.get(PROMPT))
        except RequestError as e:
            return e

    def _run(self, model: ServedModel, rows: Sequence[Encoded]) -> dict[int, Answer | Exception]:
        groups: dict[Any, list[Encoded]] = {}
        for row in rows:
            groups.setdefault(model.bucket(row)[0], []).append(row)
        answers: dict[int, Answer | Exception] = {}
        for group in groups.values():
            for start in range(0, len(group), self._rows):
                batch = group[start : start + self._rows]
                answers |= zip(map(id, batch), model.run(batch), strict=True)
        return answers

    def _generate(self, request: EmbeddedRequest) -> list[Answer | Exception] | RequestError:
        names = {f.name for f in fields(Options)}
        try:
            _check(request)
            options = Options.from_json({n: v for n, v in request.options.items() if n in names})
            texts, pairs = read_inputs(self._bundle.task.inputs, request.inputs, (), BATCH)
            if pairs is not None:
                raise RequestError(NO_PAIRS)
            return [self._bundle.generate([text], options)[0].to_json() for text in texts]
        except InputError as e:
            return client_error(e)
        except RequestError as e:
            return e

    def _columns(
        self, request: EmbeddedRequest, answers: Sequence[Answer | Exception] | RequestError
    ) -> dict[str, Array] | RequestError:
        if isinstance(answers, RequestError):
            return answers
        wrong = next((a for a in answers if isinstance(a, Exception)), None)
        if wrong is not None:
            return client_failure(wrong)
        target = str(self._bundle.engine["target"])
        right = [a for a in answers if not isinstance(a, Exception)]
        return {n: build_column(self._tensors, n, right, target) for n in request.outputs}


def _check(request: EmbeddedRequest) -> None:
    """Raise RequestError for a request that names an adapter (LoRA): inside another server the
    model answers without adapters."""
    if ADAPTER in request.options:
        raise RequestError(
            f"parameter {ADAPTER}: inside another server the model answers without adapters; "
            "serve the bundle by itself (`python -m harness serve`)",
            param=ADAPTER,
        )
