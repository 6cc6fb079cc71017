"""The part of OpenAI's HTTP interface that a model has which continues texts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..answers import Answers, Event
from ..beside import LARGE
from ..caches.completion_cache import HEADER, Events
from ..inference import Service
from ..refusals import RequestError, UnknownError
from ..scheduling.decoding import Decoding
from ..scheduling.engine import Call, Result
from . import openai
from .asgi import Receive, Response, Stream, document, while_connected
from .openai_answer import Writer, event_line
from .openai_request import TextRequest, read


@dataclass(frozen=True)
class Asking:
    """Who asks, and how the answer reaches the client. seconds: that it may take to read a part.
    control: words of the request's cache-control."""

    call: Call
    receive: Receive
    seconds: float
    control: frozenset[str] = frozenset()


async def answer(
    service: Service, body: Mapping[str, Any], asking: Asking, *, chat: bool
) -> tuple[Response | Stream, Result]:
    """POST /v1/chat/completions or /v1/completions. The result's tokens are complete when the
    response is sent. Raises RequestError, Disconnected."""
    engine = service.engine
    if not isinstance(engine, Decoding):
        task = engine.model.task.name
        raise UnknownError(f"the model does {task}; ask /v2/models/{service.name}/infer")
    client = asking.call.client
    reading = engine.beside.run(client, partial(read, body, engine.model, chat=chat))
    request = await while_connected(reading, asking.receive)
    writer = Writer(request, engine.model.name, engine.model.encoder)
    result = Result([])
    answers, headers = await _begun(service, engine, request, asking)
    result.cache = headers.get(HEADER, "")
    try:
        # a refusal of the first token still has a status of its own
        first = await while_connected(anext(answers), asking.receive)
    except BaseException:
        answers.close()
        raise
    if request.stream:
        parts = _parts(answers, first, writer, result)
        stream = Stream(parts, asking.receive, asking.seconds, answers.close, headers=headers)
        return stream, result
    events = await while_connected(_all(answers, first), asking.receive)
    work = partial(_document, writer, events)
    if request.logprob_bytes > LARGE:
        response = await while_connected(engine.beside.run(client, work), asking.receive)
    else:
        response = work()
    response.headers |= headers
    _count(result, answers, request, len(events))
    return response, result


def _document(writer: Writer, events: Sequence[Event]) -> Response:
    return document(writer.document(events))


async def _begun(
    service: Service, engine: Decoding, request: TextRequest, asking: Asking
) -> tuple[Events, dict[str, str]]:
    """The tokens of a request, as they are made or as they were before."""

    def begin() -> Answers:
        return engine.begin(request.prompts, asking.call)

    if service.completion_cache is None:
        return begin(), {}
    return await service.completion_cache.answers(request, asking.control, begin)


async def _all(answers: Events, first: Event) -> list[Event]:
    try:
        return [first, *[event async for event in answers]]
    finally:
        answers.close()


async def _parts(
    answers: Events, first: Event, writer: Writer, result: Result
) -> AsyncGenerator[bytes]:
    """A stream's bytes. An error after its first token ends it without [DONE]."""
    try:
        if part := writer.chunks(first):
            yield part
        async for event in answers:
            if part := writer.chunks(event):
                yield part
        yield writer.end()
    except RequestError as e:
        yield event_line(openai.error(e))
    finally:
        answers.close()
        _count(result, answers, writer.request, writer.tokens)


def _count(result: Result, answers: Events, request: TextRequest, tokens: int) -> None:
    result.tokens = sum(map(len, request.prompts.rows)) + tokens
    result.queued, result.times = answers.queued, answers.times
    result.model = 0.0 if answers.times is None else answers.times.model
