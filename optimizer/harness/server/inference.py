"""Answer the Open Inference Protocol v2 without its transport, for HTTP and gRPC.

A bundle is two models. NAME takes inputs of the task: `text` (BYTES, one per row; also `text_pair`)
or `image` (BYTES of a file; base64 in JSON). Its outputs are the fields of an answer that are
tensors (Task.tensors), and `answer` (BYTES), the answer as JSON. NAME-tensors is the model itself
with the tensors of the contract; text generation has only NAME, because its KV cache stays here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..generate import Piece
from ..inputs.kind import InputKind
from .answer_size import check_answer, predict_field_bytes, predict_tensor_bytes
from .caches.cache import Cache, cache_key
from .caches.completion_cache import CompletionCache
from .model import PROMPT, TENSORS, as_json
from .model_config import model_config
from .options import ANSWER as LARGEST
from .refusals import ModelError, RequestError, TooLargeError, UnknownError
from .request import HIT, MISS, QueuePlace, Request, Result
from .scheduling.decoding import ADAPTER, OPTIONS, Decoding, join_completion
from .scheduling.engine import BatchEngine
from .tensors import Array, InferRequest, datatype
from .text_model import TextModel
from .warm_up.sharing import ALONE
from .worker_threads import LARGE

SERVER = "optimize-harness"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "statistics")
ANSWER = "answer"
TEXT = "text"  # generated text
LONGEST_TIMEOUT = 24 * 3600.0  # seconds

NamedArrays = list[tuple[str, Array]]
Observer = Callable[[Sequence[Any], Sequence[Any] | None, Mapping[str, Any] | None, Any], None]
"""(inputs, pairs, parameters, answers); answers: None where the model failed."""


class Service:
    """Answers a server's requests (Open Inference Protocol) with one engine, as the models NAME and
    NAME-tensors.

    timeout: default seconds of a request
    largest: maximum bytes of an answer
    """

    def __init__(
        self, engine: BatchEngine | Decoding, version: str, timeout: float, largest: int = LARGEST
    ) -> None:
        self.engine, self.version, self.timeout, self.largest = engine, version, timeout, largest
        model = engine.model
        self.name, self.raw_name = model.name, model.name + TENSORS
        self.names = [self.name] if model.task.generates else [self.name, self.raw_name]
        adapters = model.adapters if isinstance(model, TextModel) else ()
        self.openai_names = [self.name, *adapters]  # names of a request's field `model`
        self._tensors = dict(model.task.tensors(model.contract))
        self.columns = model.task.fields(model.contract)
        self._most = model.room.texts if isinstance(model, TextModel) else model.limits.rows
        self.cache: Cache | None = None
        self.completion_cache: CompletionCache | None = None  # for text generation
        self.digest = ""  # digest of the bundle, in the keys of the cache
        self.on_answer: Observer | None = None

    def admit(self, client: str) -> QueuePlace | None:
        """Admit a request before its body is parsed; return its place in the queue.

        Returns None for text generation, and if a cache may answer without the engine. Raises
        RequestError if every request of this client would be refused now.
        """
        if self.engine.draining or (self.cache is None and self.completion_cache is None):
            return self.engine.admit(client)
        return None

    def server(self) -> dict[str, Any]:
        """Return this server's metadata as the Open Inference Protocol has them."""
        return {"name": SERVER, "version": self.version, "extensions": list(EXTENSIONS)}

    def metadata(self, name: str, version: str = "") -> dict[str, Any]:
        """Return the protocol's metadata of a served model. Raises UnknownError for another name or
        version."""
        model = self._check(name, version)
        if name == self.raw_name:
            inputs = [_describe(s.name, s.dtype, s.axes) for s in model.contract.inputs]
            outputs = [_describe(s.name, s.dtype, s.axes) for s in model.contract.outputs]
        else:
            inputs = [_describe(n, "object", ("batch", 1)) for n in self.columns]
            outputs = [_describe(n, d, ("batch", *s)) for n, (d, s) in self._tensors.items()]
            outputs.append(_describe(ANSWER, "object", ("batch",)))
        return {
            "name": name,
            "versions": [model.version],
            "platform": f"{SERVER}_{model.target}",
            "inputs": inputs,
            "outputs": outputs,
        }

    def config(self, name: str, version: str = "") -> dict[str, Any]:
        """Return Triton's configuration of a served model. Raises UnknownError for another name or
        version."""
        model, raw = self._check(name, version), name == self.raw_name
        specs = (*model.contract.inputs, *model.contract.outputs)
        batched = not raw or all(spec.axes[:1] == ("batch",) for spec in specs)
        cached = self.cache is not None or self.completion_cache is not None
        return model_config(
            self.metadata(name, version),
            rows=self._most if batched else 0,
            batches=None if isinstance(self.engine, Decoding) else self.engine.limits,
            shares=not raw and model.sharing != ALONE,
            device=model.device,
            cached=cached and not raw,
            optional=self._optional(raw=raw),
        )

    def _optional(self, *, raw: bool) -> tuple[str, ...]:
        """Return the names of the served model's inputs that a request may leave out."""
        model = self.engine.model
        if raw or model.task.extracts:
            return ()
        return self.columns if model.task.reads_texts else self.columns[1:]

    def statistics(self, name: str) -> dict[str, Any]:
        """Return Triton's statistics of a served model. Raises UnknownError for another name."""
        self._check(name, "")
        return self.engine.metrics.statistics[name].document(name, self.version)

    def take(self, request: Request, name: str = "") -> None:
        """Record in a request that this version of the model answers it.

        name: model that the request names; "" for NAME, the model that takes inputs of the task
        """
        request.model, request.version = name or self.name, self.version
        request.metrics = self.engine.metrics

    def set_limits(
        self, request: Request, parameters: Mapping[str, Any], seconds: float | None
    ) -> None:
        """Set the deadline and priority of a request. Raises RequestError for a wrong parameter.

        parameters: Triton's `timeout` (microseconds) and `priority` (0, the default, runs first)
        seconds: time limit that the transport gives; None takes the default of this service
        """
        timeout, priority = parameters.get("timeout"), parameters.get("priority", 0)
        if timeout is not None:
            if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout <= 0:
                raise RequestError("parameter timeout is not a number of microseconds from 1")
            seconds = min(timeout / 1e6, seconds if seconds is not None else timeout / 1e6)
        if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority < 100:
            raise RequestError("parameter priority is not a whole number from 0 to 99")
        if ADAPTER in parameters and not isinstance(self.engine, Decoding):
            raise RequestError(f"parameter {ADAPTER}: {self.name} has no adapters", param=ADAPTER)
        request.priority, now = priority, self.engine.clock()
        if seconds is None:
            request.deadline = now + self.timeout
        else:
            request.deadline = request.last = now + min(seconds, LONGEST_TIMEOUT)

    async def answer(
        self,
        inputs: Sequence[Any],
        pairs: Sequence[Any] | None,
        request: Request,
        parameters: Mapping[str, Any] | None = None,
    ) -> Result:
        """Answer a request from the cache, else by the engine, and report the answer to
        `on_answer`.

        inputs, pairs: inputs of the task, and their second texts; None without any
        parameters: options of the request, such as `prompt_name` or generation options; None for
            none

        Raises RequestError.
        """
        key = b""
        if self.cache is not None:
            options = self._options(parameters or {})
            key = cache_key(self.digest, self.engine.model.target, inputs, pairs, options)
            before: Result | None = self.cache.get(key)
            (self.engine.metrics.misses if before is None else self.engine.metrics.hits).add()
            if before is not None:
                return before
        try:
            result = await self.engine.answer(inputs, pairs, request, parameters)
        except ModelError:
            if self.on_answer is not None:
                self.on_answer(inputs, pairs, parameters, None)
            raise
        if self.on_answer is not None:
            self.on_answer(inputs, pairs, parameters, result.answers)
        if self.cache is not None:
            entry = Result(result.answers, result.truncated, result.tokens, cache=HIT)
            entry.lengths = result.lengths
            self.cache.put(key, entry)
            result.cache = MISS
        return result

    def _options(self, parameters: Mapping[str, Any]) -> str:
        """Return a request's parameters that change an answer as JSON, for a cache key; "" without
        any.

        These are the adapter and options of text generation, or the prompt of a sentence embedding.
        """
        generates = self.engine.model.task.generates
        names = {ADAPTER, *OPTIONS} if generates else {PROMPT}
        options = {n: v for n, v in parameters.items() if n in names}
        if not options and not generates:
            return ""
        return json.dumps(options, sort_keys=True)

    async def infer(
        self, name: str, version: str, tensors: InferRequest, request: Request
    ) -> tuple[NamedArrays, Result]:
        """Answer an inference request: ([(output, array)] in the order of the request, its Result).

        Raises RequestError.
        """
        model = self._check(name, version)
        if name == self.raw_name:
            names = [spec.name for spec in model.contract.outputs]
            chosen = _choose_outputs(tensors, names, names)
            check_answer(predict_tensor_bytes(model.contract, tensors.inputs, chosen), self.largest)
            result = await self.engine.infer(tensors.inputs, request)
            outputs: dict[str, Array] = result.answers[0]
            if absent := [n for n in chosen if n not in outputs]:
                raise RequestError(
                    f"the engine computes the answer on its device and does not give "
                    f"{', '.join(absent)}; ask model {model.name} for the answer"
                )
            return [(n, outputs[n]) for n in chosen], result
        inputs, pairs = read_inputs(model.task.inputs, tensors.inputs, tensors.textual, self._most)
        chosen = _choose_outputs(tensors, list(self._tensors) or [ANSWER], [*self._tensors, ANSWER])
        size = predict_field_bytes(model.task, model.contract, inputs, chosen, pairs)
        check_answer(size, self.largest)
        result = await self.answer(inputs, pairs, request, tensors.parameters)

        def columns() -> NamedArrays:
            answers = result.answers
            return [(n, build_column(self._tensors, n, answers, model.target)) for n in chosen]

        if size > LARGE:
            return await self.engine.worker_threads.run(request.client, columns), result
        return columns(), result

    async def pieces(
        self, name: str, version: str, tensors: InferRequest, request: Request, result: Result
    ) -> AsyncGenerator[tuple[NamedArrays, bool]]:
        """Generate one text for a client and yield ([(output, array)], last) per token.

        The outputs are the text that the token adds, and with the last token all requested outputs.
        Closing the generator ends the generation. Raises RequestError.

        result: receives the numbers of tokens and the times
        """
        assert isinstance(self.engine, Decoding)
        model = self._check(name, version)
        inputs, pairs = read_inputs(model.task.inputs, tensors.inputs, tensors.textual, self._most)
        if len(inputs) != 1:
            raise RequestError(f"{len(inputs)} texts; a stream generates one text per request")
        chosen = _choose_outputs(tensors, [*self._tensors], [*self._tensors, ANSWER])
        prompts = await self.engine.prompts(inputs, pairs, tensors.parameters, request.client)
        answers, pieces = self.engine.begin(prompts, request), list[Piece]()
        try:
            async for event in answers:
                pieces.append(event.piece)
                last = event.piece.finish is not None
                values: dict[str, Any] = {TEXT: {TEXT: event.piece.text}}
                if last:
                    values[ANSWER] = join_completion(pieces, len(prompts.rows[0])).to_json()
                names = [n for n in chosen if n in values]
                yield (
                    [(n, build_column(self._tensors, n, [values[n]], model.target)) for n in names],
                    last,
                )
        finally:
            answers.close()
            result.tokens = len(prompts.rows[0]) + len(pieces)
            result.lengths = (len(prompts.rows[0]),)
            result.queued, result.times = answers.queued, answers.times

    def _check(self, name: str, version: str) -> Any:
        model = self.engine.model
        if name not in self.names or version not in ("", model.version):
            raise UnknownError(
                f"unknown model or version; here {'is' if len(self.names) == 1 else 'are'} "
                f"{' and '.join(self.names)}, version {model.version}"
            )
        return model


def read_inputs(
    kind: InputKind, arrays: Mapping[str, Array], textual: Collection[str], most: int
) -> tuple[list[Any], list[Any] | None]:
    """Convert columns of a client's request to (inputs, their second texts; None without that
    column).

    kind: kind of the inputs that the task takes
    arrays: columns by name
    textual: names of the columns that came as JSON strings
    most: maximum number of inputs

    Raises RequestError.
    """
    if kind.instead and kind.instead in arrays:
        kind = replace(kind, requested=(kind.instead,), instead="", received=_as_text)
    first, accepted = kind.fields[0], " and optionally ".join(kind.fields)
    accepted += f", or {kind.instead}" if kind.instead else ""
    unknown = set(arrays) - set(kind.fields)
    if unknown or first not in arrays:
        raise RequestError(f"{'unknown' if unknown else 'missing'} input; accepted: {accepted}")
    rows = arrays[first].size
    if not 0 < rows <= most:
        raise TooLargeError(f"{rows} inputs; accepted: 1 to {most}")
    columns = [  # a pair is a text for every kind
        _decode_column(name, arrays[name], kind.received if name == first else _as_text, textual)
        for name in kind.fields
        if name in arrays
    ]
    inputs, pairs = columns if len(columns) > 1 else (columns[0], None)
    if pairs is not None and len(pairs) != len(inputs):
        raise RequestError(f"{len(pairs)} elements of {kind.fields[1]} for {len(inputs)}")
    return inputs, pairs


def build_column(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    name: str,
    answers: Sequence[Mapping[str, Any]],
    engine: str,
) -> Array:
    """Return field `name` of each answer as an array for the client; for ANSWER, each answer as
    JSON.

    tensors: {field: (dtype, axes)} from Task.tensors
    engine: name of the engine, for the JSON
    """
    if name == ANSWER:
        return _object_array([as_json(answer, engine) for answer in answers])
    dtype, _ = tensors[name]
    values = [answer[name] for answer in answers]
    if dtype == "object":
        return _object_array([str(value).encode() for value in values])
    return np.asarray(values, dtype)


def _describe(name: str, dtype: str, axes: Sequence[str | int]) -> dict[str, Any]:
    shape = [axis if isinstance(axis, int) else -1 for axis in axes]
    return {"name": name, "datatype": datatype(dtype), "shape": shape}


def _as_text(data: bytes, _textual: bool) -> str:
    return data.decode()


def _decode_column(
    name: str, array: Array, received: Callable[[bytes, bool], Any], textual: Collection[str]
) -> list[Any]:
    if array.dtype != object or array.ndim not in (1, 2) or array.shape[1:] not in ((), (1,)):
        raise RequestError(f"input '{name}' is not BYTES of shape [{name}s] or [{name}s, 1]")
    inputs = []
    for i, element in enumerate(array.reshape(-1)):
        where = f"input '{name}', element {i}"
        try:
            inputs.append(received(element, name in textual))
        except UnicodeDecodeError as e:
            raise RequestError(f"{where}: byte {e.start + 1} is not UTF-8") from None
        except ValueError:
            raise RequestError(f"{where} is not base64, which JSON requires") from None
    return inputs


def _choose_outputs(
    request: InferRequest, default: Sequence[str], names: Sequence[str]
) -> dict[str, bool]:
    """Return {output: True if binary, False if JSON} in the order in which a client's request names
    them. Raises RequestError.

    default: outputs of a request that names none
    names: accepted names
    """
    if request.outputs is None:
        return dict.fromkeys(default, request.binary)
    if any(o.name not in names for o in request.outputs):
        raise RequestError(f"unknown output; accepted: {', '.join(names)}")
    return {o.name: o.binary for o in request.outputs}


def _object_array(elements: Sequence[bytes]) -> Array:
    array = np.empty(len(elements), object)
    array[:] = elements
    return array
