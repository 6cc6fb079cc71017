"""Answer OpenAI's /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.responses import Response

from ..answers import Event, TokenStream
from ..caches.completion_cache import HEADER, Events
from ..inference import Service
from ..refusals import RequestError, UnknownError
from ..request import Result
from ..scheduling.decoding import Decoding
from ..worker_threads import LARGE
from . import openai
from .openai_answer import AnswerWriter, event_line
from .openai_request import TextRequest, read
from .request import Document, EventStream, HttpRequest, cache_control


async def answer(
    service: Service, body: Mapping[str, Any], request: HttpRequest, *, chat: bool
) -> Response:
    """Answer a request to /v1/chat/completions if `chat`, else /v1/completions.

    body: JSON of the request

    Raises RequestError, ClientDisconnect.
    """
    engine = service.engine
    if not isinstance(engine, Decoding):
        task = engine.model.task.name
        raise UnknownError(
            f"the model's task is {task}; its path is /v2/models/{service.name}/infer"
        )
    service.set_limits(request, {}, request.timeout())
    client = request.client
    reading = engine.worker_threads.run(client, partial(read, body, engine.model, chat=chat))
    generation = await request.while_connected(reading)
    name = generation.prompts.adapter or engine.model.name
    writer = AnswerWriter(generation, name, engine.model.encoder)

    def begin() -> TokenStream:
        return engine.begin(generation.prompts, request)

    headers: dict[str, str] = {}
    answers: Events
    if service.completion_cache is None:
        answers = begin()
    else:
        control = cache_control(request.headers)
        answers, headers = await service.completion_cache.answers(generation, control, begin)
    prompts = generation.prompts
    result = Result([], cache=headers.get(HEADER, ""), rows=len(prompts.rows) * prompts.n)
    try:
        # until the first token the answer can still have an error's status
        first = await request.while_connected(anext(answers))
    except BaseException:
        answers.close()
        raise
    if generation.stream:
        request.result = result
        engine.metrics.success.add()
        headers["cache-control"] = "no-store"
        return EventStream(_stream_parts(answers, first, writer, result), headers=headers)
    events = await request.while_connected(_collect(answers, first))
    work = partial(_write_document, writer, events)
    if generation.logprob_bytes > LARGE:
        response = await request.while_connected(engine.worker_threads.run(client, work))
    else:
        response = work()
    response.headers.update(headers)
    _count(result, answers, generation, len(events))
    return request.finish(response, result)


def _write_document(writer: AnswerWriter, events: Sequence[Event]) -> Response:
    return Document(writer.document(events))


async def _collect(answers: Events, first: Event) -> list[Event]:
    try:
        return [first, *[event async for event in answers]]
    finally:
        answers.close()


async def _stream_parts(
    answers: Events, first: Event, writer: AnswerWriter, result: Result
) -> AsyncGenerator[bytes]:
    """Yield the bytes of an answer streamed to a client.

    An error after the first token ends the stream without [DONE].

    first: first event, received before the response began
    """
    try:
        if part := writer.chunks(first):
            yield part
        async for event in answers:
            if part := writer.chunks(event):
                yield part
        yield writer.end()
    except RequestError as e:
        yield event_line(openai.build_error(e))
    finally:
        answers.close()
        _count(result, answers, writer.request, writer.tokens)


def _count(result: Result, answers: Events, request: TextRequest, tokens: int) -> None:
    result.lengths = tuple(map(len, request.prompts.rows))
    result.tokens = sum(result.lengths) + tokens
    result.queued, result.times = answers.queued, answers.times
    result.model = 0.0 if answers.times is None else answers.times.model
