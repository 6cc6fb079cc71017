"""Texts that are continued together: each is what `predict` gives it alone, and none is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from optimizer.harness.server.request import Request
from optimizer.harness.server.scheduling.decoding import Decoding
from tests.harness.server.serving import Client, on_server
from tests.package.bundles import generation_bundle

PROMPTS = ["good", "a good film", "the worst film of all " * 3, "x", "never again", "no", "a b c d"]
FOREVER = float("inf")


def engine_of(client: Client) -> Decoding:
    engine = client.app.first_service().engine
    assert isinstance(engine, Decoding)
    return engine


class Gate:
    """A model's slots that take a step only when they may."""

    def __init__(self, engine: Decoding, monkeypatch: pytest.MonkeyPatch) -> None:
        self._step, self.sizes = engine.model.slots.step, list[int]()
        self._may, self.at = threading.Semaphore(0), threading.Event()
        monkeypatch.setattr(engine.model.slots, "step", self.step)

    def step(self, tokens: Mapping[int, int]) -> Any:
        self.at.set()
        assert self._may.acquire(timeout=20)
        self.sizes.append(len(tokens))
        return self._step(tokens)

    def open(self, steps: int = 10_000) -> None:
        self._may.release(steps)


def text_of(reply: Any) -> str:
    assert reply.status == 200, reply.body
    return str(reply.json["choices"][0]["text"])


def expected(bundle: Path, prompts: list[str], **options: Any) -> list[str]:
    with Bundle(bundle) as opened:
        return [opened.generate([p], Options(**options))[0].text for p in prompts]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.3, "seed": 5}])
@pytest.mark.parametrize("slots", ["3", "8"])
def test_texts_that_come_while_others_run_are_those_of_predict(
    decoder_bundle: Path, options: dict[str, Any], slots: str
) -> None:
    async def test(client: Client) -> None:
        assert engine_of(client).model.sharing == "equal"
        tasks = []
        for i, prompt in enumerate(PROMPTS * 2):
            tasks.append(asyncio.create_task(client.complete(prompt, max_tokens=12, **options)))
            await asyncio.sleep(0.002 * (i % 3))
        texts = [text_of(await task) for task in tasks]
        assert texts == expected(decoder_bundle, PROMPTS * 2, max_new_tokens=12, **options)
        assert engine_of(client).metrics.unequal.lines({})[0].endswith(" 0")

    on_server(decoder_bundle, test, "--slots", slots)


@pytest.mark.parametrize("cache", ["new", "one length"])
def test_a_model_whose_texts_cannot_share_a_step_serves_each_by_itself_and_says_so(
    cache: str, tmp_path: Path
) -> None:
    bundle = generation_bundle.make(tmp_path, cache)

    async def test(client: Client) -> None:
        assert [line["sharing"] for line in client.lines if "sharing" in line] == ["alone"]
        replies = [client.complete(p, max_tokens=8, temperature=0) for p in PROMPTS]
        texts = [text_of(reply) for reply in await asyncio.gather(*replies)]
        assert texts == expected(bundle, PROMPTS, max_new_tokens=8, temperature=0)

    on_server(bundle, test)


def test_a_text_joins_those_that_run(decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client) -> None:
        gate = Gate(engine_of(client), monkeypatch)
        first = asyncio.create_task(client.complete("good", max_tokens=20, ignore_eos=True))
        await asyncio.to_thread(gate.at.wait, 20)
        second = asyncio.create_task(client.complete("bad", max_tokens=4, ignore_eos=True))
        await asyncio.sleep(0.02)
        gate.open()
        await asyncio.gather(first, second)
        assert gate.sizes[0] == 1
        assert 2 in gate.sizes

    on_server(decoder_bundle, test)


def test_a_client_that_leaves_frees_its_slot_within_a_token(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        engine, gone = engine_of(client), asyncio.Event()
        gate = Gate(engine, monkeypatch)
        body = {"model": "tiny-decoder", "prompt": "good", "max_tokens": 50, "ignore_eos": True}
        path = "/v1/completions"
        left = asyncio.create_task(client.ask("POST", path, {**body, "stream": True}, gone=gone))
        await asyncio.to_thread(gate.at.wait, 20)
        waits = asyncio.create_task(client.complete("bad", max_tokens=2, ignore_eos=True))
        await asyncio.sleep(0.02)
        gone.set()
        await left
        gate.open()
        assert (await waits).status == 200
        assert gate.sizes == [1, 1]  # the step that ran when it left, and one of the next text
        assert client.lines[-1]["status"] == 200
        assert [line["status"] for line in client.lines if line["event"] == "request"] == [499, 200]

    on_server(decoder_bundle, test, "--slots", "1")


def test_a_client_that_leaves_while_its_last_token_is_made_stops_no_other(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        gate, gone = Gate(engine_of(client), monkeypatch), asyncio.Event()
        body = {"model": "tiny-decoder", "prompt": "good", "max_tokens": 2, "ignore_eos": True}
        left = asyncio.create_task(client.ask("POST", "/v1/completions", body, gone=gone))
        await asyncio.to_thread(gate.at.wait, 20)
        gone.set()
        await left
        gate.open()
        async with asyncio.timeout(10):
            assert (await client.complete("bad", max_tokens=2, ignore_eos=True)).status == 200

    on_server(decoder_bundle, test)


def test_a_drained_server_ends_what_it_accepted(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        gate = Gate(engine_of(client), monkeypatch)
        accepted = [
            asyncio.create_task(client.complete(p, max_tokens=5, ignore_eos=True)) for p in PROMPTS
        ]
        async with asyncio.timeout(20):
            while engine_of(client).waiting < len(PROMPTS):  # the others are still read
                await asyncio.sleep(0.01)
        ending = asyncio.create_task(engine_of(client).wait_until_drained())
        await asyncio.sleep(0.02)
        assert (await client.complete("late")).status == 503
        gate.open()
        await ending
        assert [(await a).status for a in accepted] == [200] * len(PROMPTS)

    on_server(decoder_bundle, test, "--slots", "2")


def test_a_model_that_fails_fails_the_texts_of_that_step_and_no_other(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slots = engine_of(client).model.slots
        step = slots.step

        def broken(tokens: Mapping[int, int]) -> Any:
            monkeypatch.setattr(slots, "step", step)
            raise RuntimeError("confidential")

        monkeypatch.setattr(slots, "step", broken)
        reply = await client.complete("bad", ignore_eos=True)
        assert (reply.status, reply.json["error"]["message"]) == (
            500,
            "the model failed (unexpected failure)",
        )
        assert (await client.complete("good")).status == 200

    on_server(decoder_bundle, test, "--slots", "1")


def test_scores_that_are_nan_are_the_error_of_their_own_text(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slots = engine_of(client).model.slots
        read = slots.read

        def broken(text: int, ids: Any) -> Any:
            scores = read(text, ids)
            return np.full_like(scores, np.nan) if text == 0 else scores

        monkeypatch.setattr(slots, "read", broken)
        replies = await asyncio.gather(client.complete("bad"), client.complete("good"))
        assert sorted(reply.status for reply in replies) == [200, 500]

    on_server(decoder_bundle, test)


def test_steps_that_change_scores_after_all_are_noticed_and_not_used(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        engine = engine_of(client)
        step = engine.model.slots.step

        def mixing(tokens: Mapping[int, int]) -> Any:
            scores = step(tokens)
            return {n: s[::-1] for n, s in scores.items()} if len(tokens) > 1 else scores

        monkeypatch.setattr(engine.model.slots, "step", mixing)
        options = {"max_tokens": 10, "temperature": 0, "ignore_eos": True}
        replies = await asyncio.gather(*(client.complete(p, **options) for p in PROMPTS[:3]))
        wanted = expected(
            decoder_bundle, PROMPTS[:3], max_new_tokens=10, temperature=0, ignore_eos=True
        )
        assert [text_of(reply) for reply in replies] == wanted
        assert engine.model.sharing == "alone"
        await asyncio.sleep(0.01)
        errors = [line["event"] for line in client.lines if line["level"] == "error"]
        assert errors == ["batches_change_answers"]

    on_server(decoder_bundle, test)


def test_an_answer_that_takes_longer_than_its_client_waits_is_an_error(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        engine = engine_of(client)
        gate, now = Gate(engine, monkeypatch), engine.clock()
        body = {"model": "tiny-decoder", "prompt": "good", "max_tokens": 50, "ignore_eos": True}
        headers = {"x-request-timeout": "5"}
        asked = asyncio.create_task(client.ask("POST", "/v1/completions", body, headers))
        await asyncio.to_thread(gate.at.wait, 20)
        monkeypatch.setattr(engine, "clock", lambda: now + 6)
        gate.open()
        assert (await asked).status == 503

    on_server(decoder_bundle, test)


def test_what_no_longer_fits_is_refused_before_it_waits(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        engine = engine_of(client)
        gate = Gate(engine, monkeypatch)
        options = {"max_tokens": 60, "ignore_eos": True}
        flood = [asyncio.create_task(client.complete("good", **options))]
        await asyncio.to_thread(gate.at.wait, 20)
        flood.append(asyncio.create_task(client.complete("good", **options)))
        await asyncio.sleep(0.02)
        reply = await client.complete("good", **options)
        assert (reply.status, reply.headers.get("retry-after")) == (429, "1"), reply
        gate.open()
        assert [(await task).status for task in flood] == [200, 200]

    on_server(decoder_bundle, test, "--slots", "1", "--max-wait", "0.0000001")


def test_v2_gives_the_answers_of_predict_also_to_several_texts(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        engine = engine_of(client)
        result = await engine.answer(
            PROMPTS, None, Request(deadline=FOREVER), {"max_new_tokens": 6}
        )
        with Bundle(decoder_bundle) as opened:
            for i, (prompt, answer) in enumerate(zip(PROMPTS, result.answers, strict=True)):
                options = Options(max_new_tokens=6)
                alone = opened.generate([prompt], options, numbers=[i])[0]
                assert answer == alone.to_json()

    on_server(decoder_bundle, test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_says_how_long_the_model_had_a_text(decoder_bundle: Path, stream: bool) -> None:
    async def test(client: Client) -> None:
        await client.complete("good", max_tokens=4, stream=stream)
        line = client.lines[-1]
        assert 0 < line["model_ms"] <= line["ms"]

    on_server(decoder_bundle, test)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.3, "seed": 5}])
def test_with_guessed_tokens_texts_are_those_of_predict_with_as_many(
    decoder_bundle: Path, options: dict[str, Any]
) -> None:
    with Bundle(decoder_bundle, prompt_lookup=3) as opened:
        asked = Options(max_new_tokens=14, **options)
        right = [opened.generate([p], asked)[0].text for p in PROMPTS]

    async def test(client: Client) -> None:
        (line,) = [line for line in client.lines if line["event"] == "warmed_up"]
        assert (line["sharing"], line["prompt_lookup"]) == ("alone", 3)
        replies = [client.complete(p, max_tokens=14, **options) for p in PROMPTS]
        assert [text_of(reply) for reply in await asyncio.gather(*replies)] == right

    on_server(decoder_bundle, test, "--prompt-lookup", "3", "--slots", "3")


def test_what_was_guessed_and_what_of_it_was_right_is_counted(decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        text_of(await client.complete("a b a b a b a b", max_tokens=40, ignore_eos=True))
        metrics = engine_of(client).metrics
        guessed, right = (
            float(m.lines({})[0].split()[-1]) for m in (metrics.guessed, metrics.guessed_right)
        )
        assert guessed >= 1
        assert 0 <= right <= guessed

    on_server(decoder_bundle, test, "--prompt-lookup", "1")


def test_a_text_of_guesses_that_fails_ends_no_other(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slots, broken = engine_of(client).model.slots, list[int]()
        scores = slots.scores

        def fails(text: int, ids: Any) -> Any:
            if len(ids) == 2:  # a step, and no prompt
                broken.append(text)
                if text == broken[0]:
                    raise RuntimeError("out of memory")
            return scores(text, ids)

        monkeypatch.setattr(slots, "scores", fails)
        replies = await asyncio.gather(*(client.complete(p, max_tokens=6) for p in PROMPTS[1:4]))
        assert sorted(r.status for r in replies) == [200, 200, 500]

    on_server(decoder_bundle, test, "--prompt-lookup", "1", "--slots", "3")


def test_larger_steps_that_come_to_change_answers_are_found_and_given_up(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ["a b a b a b a b a b", "no no no no no no no"]
    with Bundle(decoder_bundle, prompt_lookup=1) as opened:
        asked = Options(max_new_tokens=30, do_sample=False, ignore_eos=True)
        right = [opened.generate([p], asked)[0].text for p in prompts]

    async def test(client: Client) -> None:
        engine = engine_of(client)
        engine._guess_seconds = {2: 1.0, 4: 1.0, 8: 1.0}  # as if more rows cost nothing
        slots, sizes = engine.model.slots, list[int]()
        scores = slots.scores

        def uneven(text: int, ids: Any) -> Any:
            sizes.append(len(ids))
            return scores(text, ids) + np.float32(1000 * (len(ids) == 8))

        monkeypatch.setattr(slots, "scores", uneven)
        replies = [
            await client.complete(p, max_tokens=30, temperature=0, ignore_eos=True) for p in prompts
        ]
        assert [text_of(reply) for reply in replies] == right
        assert engine.metrics.unequal.lines({})[0].endswith(" 1")
        assert [n for n in sizes if n == 8] == [8]
        assert "guesses_change_answers" in [line["event"] for line in client.lines]

    on_server(decoder_bundle, test, "--prompt-lookup", "7", "--slots", "1")
