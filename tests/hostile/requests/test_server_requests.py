"""No short request makes a server answer long, build much, or leave its event loop waiting."""

import asyncio
import gzip
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.inputs import chat
from optimizer.harness.server import tensors
from optimizer.harness.server.answer_size import check_answer
from optimizer.harness.server.http import request as http_request
from optimizer.harness.server.refusals import RequestError
from optimizer.harness.server.worker_threads import WorkerThreads
from tests.harness.server.serving import Client, Reply, on_server
from tests.hostile.requests.server_requests import KINDS, Attack, drawn
from tests.package.bundles import generation_bundle, small_bundle

EACH = 4
LARGEST = 1 << 20  # bytes of an answer here


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Bundles by whether they generate text."""
    folder = tmp_path_factory.mktemp("attacked")
    encoder = small_bundle.make(folder, (small_bundle.ORT,)) / "bundle"
    (folder / "decoder").mkdir()
    return {False: encoder, True: generation_bundle.make(folder / "decoder")}


def asked(bundle: Path, attacks: list[Attack]) -> tuple[list[Reply], list[dict[str, Any]]]:
    replies, lines = list[Reply](), list[dict[str, Any]]()

    async def test(client: Client) -> None:
        for attack in attacks:
            replies.append(await client.ask("POST", attack.path, attack.body, attack.headers))
        lines.extend(client.lines)

    on_server(bundle, test, "--max-answer", str(LARGEST), "--rows", "4")
    return replies, lines


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
def test_short_requests_get_short_answers_or_are_refused(
    bundles: dict[bool, Path], decoder: bool
) -> None:
    attacks = [a for a in drawn(0, EACH) if a.decoder is decoder]
    replies, lines = asked(bundles[decoder], attacks)
    for attack, reply in zip(attacks, replies, strict=True):
        assert reply.status in (200, 400, 413), (attack.name, reply)
        assert len(reply.body) <= LARGEST, attack.name
    assert not [line for line in lines if line.get("event") == "bug"]


def test_each_kind_is_refused_for_what_it_is(bundles: dict[bool, Path]) -> None:
    """And not, say, because it is not a request at all."""
    words = {
        "repeated outputs": "comes twice",
        "many positions": "the answer would have",
        "many values": "more than 524288 values",
        "many messages": "messages",
        "many texts": "texts",
        "endless schema": "response_format",
    }
    found = dict.fromkeys(words, False)
    for decoder in (False, True):
        attacks = [a for a in drawn(1, EACH) if a.decoder is decoder]
        for attack, reply in zip(attacks, asked(bundles[decoder], attacks)[0], strict=True):
            found[attack.name] |= words[attack.name].encode() in reply.body
    assert found == dict.fromkeys(words, True)
    assert len(words) == len(KINDS)


def test_what_is_large_is_unpacked_parsed_and_rendered_beside_the_event_loop(
    bundles: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[tuple[str, bool]]()

    def watch(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            threads.append((name, threading.current_thread() is threading.main_thread()))
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    for module, name in ((tensors, "parse_shallow"), (http_request, "inflate"), (chat, "render")):
        watch(module, name)
    messages = [{"role": "user", "content": "good"}] * 3
    attacks = [a for a in drawn(0, EACH) if a.decoder]
    body = tensors.write_json({"model": "tiny-decoder", "messages": messages, "max_tokens": 1})
    packed, path = {"content-encoding": "gzip"}, "/v1/chat/completions"
    attacks.append(Attack("packed", path, gzip.compress(body), True, packed))
    attacks.append(Attack("small", path, body, True))
    replies, _ = asked(bundles[True], attacks)
    assert replies[-1].status == 200
    assert {name for name, _ in threads} == {"parse_shallow", "inflate", "render"}
    assert not any(on_loop for _, on_loop in threads)


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "repeated outputs": (tensors, "check_once", lambda _: None),
    "many values": (tensors, "check_size", lambda *_: None),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_server_without_the_check_is_found_out(
    kind: str, bundles: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, fault = FAULTS[kind]
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError):
        test_each_kind_is_refused_for_what_it_is(bundles)


def test_work_that_is_done_on_the_event_loop_is_found_out(
    bundles: dict[bool, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(self: WorkerThreads, client: str, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(0)
        return work()

    monkeypatch.setattr(WorkerThreads, "run", at_once)
    with pytest.raises(AssertionError):
        test_what_is_large_is_unpacked_parsed_and_rendered_beside_the_event_loop(
            bundles, monkeypatch
        )


def test_bodies_that_are_held_together_have_a_limit() -> None:
    bodies = http_request.Bodies(10)
    with bodies.room(6), pytest.raises(RequestError, match="holds too many"):
        bodies.add(5)
    bodies.add(10)


def test_an_answer_is_refused_by_its_bytes() -> None:
    check_answer(10, 10)
    with pytest.raises(RequestError, match="up to 11 bytes"):
        check_answer(11, 10)
