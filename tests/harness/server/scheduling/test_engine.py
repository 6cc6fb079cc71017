"""The model's thread: nothing is lost, or run for a client that left, or silently other."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import InputError
from optimizer.harness.server.model import ServedModel
from optimizer.harness.server.refusals import DrainingError
from optimizer.harness.server.request import Request
from optimizer.harness.server.scheduling import engine as engines
from tests.harness.server.serving import Client, on_server
from tests.package.bundles import small_bundle

FOREVER = float("inf")


class Slow:
    """A model that runs when it may; rows by their texts, in the order in which they ran."""

    def __init__(self, model: ServedModel) -> None:
        self.run, self.ran, self.go = model.run, list[Any](), threading.Event()
        self.started = threading.Event()

    def __call__(self, rows: Sequence[Any]) -> list[Any]:
        self.started.set()
        assert self.go.wait(20)
        self.ran += [row.input for row in rows]
        return self.run(rows)


def slowed(client: Client, monkeypatch: pytest.MonkeyPatch) -> Slow:
    model = client.app.first_service().engine.model
    slow = Slow(model)
    monkeypatch.setattr(model, "run", slow)
    return slow


def test_a_client_that_leaves_is_not_computed_for(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slow, gone = slowed(client, monkeypatch), asyncio.Event()
        first = asyncio.create_task(client.infer(["good"]))
        await asyncio.to_thread(slow.started.wait, 20)
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["bad film"]}
        path = "/v2/models/tiny/infer"
        left = asyncio.create_task(client.ask("POST", path, {"inputs": [tensor]}, gone=gone))
        stays = asyncio.create_task(client.infer(["film"]))
        await asyncio.sleep(0.05)
        gone.set()
        assert (await left).status == 499
        slow.go.set()
        assert [(await r).status for r in (first, stays)] == [200, 200]
        assert slow.ran == ["good", "film"]

    on_server(made, test)


def test_a_drained_engine_answers_what_it_accepted(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slow = slowed(client, monkeypatch)
        accepted = [asyncio.create_task(client.infer([t])) for t in ("good", "bad film", "a film")]
        await asyncio.to_thread(slow.started.wait, 20)
        await asyncio.sleep(0.05)
        ending = asyncio.create_task(client.app.first_service().engine.wait_until_drained())
        await asyncio.sleep(0.05)
        assert (await client.infer(["late"])).status == 503
        slow.go.set()
        await ending
        assert [(await a).status for a in accepted] == [200] * 3

    on_server(made, test)


def test_as_many_batches_run_at_once_as_there_are_workers(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        (line,) = [line for line in client.lines if line["event"] == "warmed_up"]
        assert line["workers"] == 2
        model = client.app.first_service().engine.model
        run, both = model.run, threading.Barrier(2, timeout=20)

        def together(rows: Sequence[Any]) -> list[Any]:
            both.wait()  # alone it would end after its time with an error
            return run(rows)

        monkeypatch.setattr(model, "run", together)
        texts = ("good", "a bad film")  # of two lengths, that share no batch
        replies = await asyncio.gather(*(client.infer([t]) for t in texts))
        assert [r.status for r in replies] == [200, 200]

    on_server(made, test, "--workers", "2")


def test_a_runtime_that_runs_one_batch_at_a_time_is_given_no_more(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Client) -> None:
        raise AssertionError

    monkeypatch.setattr(Bundle, "reentrant", False)
    with pytest.raises(InputError, match="one batch at a time"):
        on_server(made, never, "--workers", "2")


def test_workers_that_another_engine_was_tuned_with_become_one_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    small_bundle.edited(bundle, lambda m: m["recipe"].update({"serve": {"workers": 2}}))

    async def test(client: Client) -> None:
        lines = {line["event"]: line for line in client.lines}
        assert "one batch at a time" in lines["one_worker"]["message"]
        assert (lines["warmed_up"]["workers"], lines["warmed_up"]["most_workers"]) == (1, 1)
        assert (await client.infer(["good"])).status == 200

    monkeypatch.setattr(Bundle, "reentrant", False)
    on_server(bundle, test)


def test_a_deadline_that_cannot_be_kept_is_refused_before_it_waits(made: Path) -> None:
    async def test(client: Client) -> None:
        reply = await client.infer(["good"], timeout=1)  # microseconds
        assert reply.status == 503
        assert "before its timeout" in reply.json["error"]

    on_server(made, test)


def test_an_answer_that_comes_too_late_is_an_error(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        slow = slowed(client, monkeypatch)
        waiting = asyncio.create_task(client.infer(["good"], timeout=200_000))
        await asyncio.to_thread(slow.started.wait, 20)
        await asyncio.sleep(0.25)
        slow.go.set()
        assert (await waiting).status == 503

    on_server(made, test)


def test_a_model_that_fails_fails_its_own_batch_and_no_other(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        model = client.app.first_service().engine.model
        run = model.run

        def broken(rows: Sequence[Any]) -> list[Any]:
            if rows[0].input == "bad":
                raise RuntimeError("confidential")
            return run(rows)

        monkeypatch.setattr(model, "run", broken)
        reply = await client.infer(["bad"])
        assert (reply.status, reply.json["error"]) == (500, "the model failed (unexpected failure)")
        assert (await client.infer(["good"])).status == 200

    on_server(made, test)


def test_a_batch_that_changes_answers_after_all_is_noticed_and_not_sent(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: Client) -> None:
        engine = client.app.first_service().engine
        assert engine.model.sharing == "equal"
        run = engine.model.run

        def mixing(rows: Sequence[Any]) -> list[Any]:
            answers = run(rows)
            if len(rows) > 1:  # as a range over the whole batch would
                return [{"embedding": [x + 1e-7 for x in dict(a)["embedding"]]} for a in answers]
            return answers

        monkeypatch.setattr(engine.model, "run", mixing)
        texts = ["good", "film"]
        results = await engine.answer(texts, None, Request(deadline=FOREVER))
        assert results.answers == [run([r])[0] for r in engine.model.encode(texts, None)]
        assert engine.model.sharing == "alone"
        await asyncio.sleep(0.01)
        assert [x["event"] for x in client.lines if x["level"] == "error"] == [
            "batches_change_answers"
        ]

    on_server(made, test)


def test_the_first_shared_batches_are_compared_and_then_one_in_many() -> None:
    compared = [n for n in range(1, 600) if not (n % engines.RECHECK and n & (n - 1))]
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_what_is_refused_is_not_tokenized(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: Client) -> None:
        engine = client.app.first_service().engine

        def encode(*_: Any) -> Any:
            raise AssertionError

        monkeypatch.setattr(engine.model, "encode", encode)
        engine.drain()
        with pytest.raises(DrainingError):
            await engine.answer(["good"], None, Request(deadline=FOREVER))

    on_server(made, test)
