"""A new version of a bundle, loaded beside the old one where it lies, while requests come."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import InputError
from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.request import Security
from optimizer.harness.server.http.server import HttpServer
from optimizer.harness.server.versions.loader import BundleLoader
from tests.harness.server.serving import Client, parsed
from tests.package.bundles.small_bundle import edited

TOKEN = {"Authorization": "Bearer key"}
LOAD = "/v2/repository/models/tiny/load"


@pytest.fixture(scope="module")
def second(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 2 of the bundle, whose answers are others. Read-only."""
    folder = tmp_path_factory.mktemp("second") / "bundle"

    def change(manifest: Any) -> None:
        manifest["version"], manifest["contract"]["pooling"] = "2", "cls"

    return edited(Path(shutil.copytree(made, folder)), change)


@pytest.fixture
def link(made: Path, tmp_path: Path) -> Path:
    """A link to version 1, to be turned to another."""
    link = tmp_path / "current"
    link.symlink_to(made)
    return link


def turn(link: Path, folder: Path) -> None:
    new = link.with_name("new")
    new.symlink_to(folder)
    new.rename(link)


def opened(path: Path | None, stack: ExitStack) -> Bundle:
    assert path is not None
    return stack.enter_context(Bundle(path.resolve()))


@asynccontextmanager
async def loading(
    bundle: Path, *beside: Path, token: str = "key", words: Sequence[str] = ()
) -> AsyncIterator[tuple[Client, App]]:
    """A server whose bundles can be loaded again."""
    lines: list[dict[str, Any]] = []

    def say(**fields: Any) -> None:
        lines.append(fields)

    app = App(Security(token=token), say)
    args = parsed("--rows", "2", *words, *(w for b in beside for w in ("--beside", str(b))))
    args.bundle = bundle
    loader = BundleLoader(opened, args, app.versions, say)
    try:
        await loader.start()
        app.load = loader.load
        yield Client(app, lines), app
        await app.versions.wait_until_drained()
    finally:
        await loader.close()


def on_loader(
    test: Callable[[Client, App], Awaitable[None]], bundle: Path, *beside: Path, **more: Any
) -> None:
    async def run() -> None:
        async with loading(bundle, *beside, **more) as server:
            await test(*server)

    asyncio.run(run())


async def embedded(client: Client, path: str = "/v2/models/tiny/infer", **more: str) -> Any:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a good film"]}
    reply = await client.ask("POST", path, {"inputs": [tensor]}, {**TOKEN, **more})
    assert reply.status == 200, reply.body
    return reply.json["model_version"], reply.json["outputs"][0]["data"]


def predicted(bundle: Path) -> Any:
    with Bundle(bundle) as opened:
        return opened.predict(["a good film"])[0]["embedding"]


async def asked_over_socket(port: int, method: str, path: str, body: Any) -> Any:
    """(status, document) over a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer key\r\nconnection: close\r\n"
    )
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    head, _, content = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def test_requests_over_a_socket_are_moved_to_a_new_version_and_none_is_lost(
    link: Path, made: Path, second: Path
) -> None:
    expected = {"1": predicted(made), "2": predicted(second)}
    assert expected["1"] != expected["2"]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a good film"]}

    async def test(client: Client, app: App) -> None:
        server = HttpServer(app, 5.0, 50, 50)
        await server.start("127.0.0.1", 0)
        versions, ending = list[str](), asyncio.Event()

        async def asks() -> None:
            while not ending.is_set():
                status, answer = await asked_over_socket(
                    server.port, "POST", "/v2/models/tiny/infer", {"inputs": [tensor]}
                )
                if answer == {"error": "the queue is full"}:  # refused, not lost: a busy machine
                    continue
                assert status == 200, answer
                assert answer["outputs"][0]["data"] == expected[answer["model_version"]]
                versions.append(answer["model_version"])

        clients = [asyncio.create_task(asks()) for _ in range(4)]
        while not versions:
            assert not any(c.done() for c in clients)
            await asyncio.sleep(0.001)
        turn(link, second)
        loaded = await asked_over_socket(server.port, "POST", LOAD, {})
        assert loaded == (200, {})
        after = len(versions)
        while len(versions) < after + 20:
            assert not any(c.done() for c in clients)
            await asyncio.sleep(0.001)
        ending.set()
        await asyncio.gather(*clients)
        assert versions[0] == "1"
        assert versions[after:].count("1") <= 4  # of each client one may have been under way
        await server.close()
        assert [line["version"] for line in client.lines if line["event"] == "unloaded"] == ["1"]

    on_loader(test, link)


def test_what_cannot_be_loaded_leaves_the_old_version_where_it_is(
    link: Path, made: Path, second: Path, tmp_path: Path
) -> None:
    def renamed(manifest: Any) -> None:
        manifest["name"] = "other"

    def same_version(manifest: Any) -> None:
        manifest["contract"]["pooling"] = "cls"

    damaged = Path(shutil.copytree(second, tmp_path / "damaged"))
    (damaged / "tokenizer" / "tokenizer.json").write_text("{}")
    other = edited(Path(shutil.copytree(second, tmp_path / "other")), renamed)
    same = edited(Path(shutil.copytree(made, tmp_path / "same")), same_version)

    async def test(client: Client, app: App) -> None:
        for wrong in (damaged, other, same, tmp_path / "missing"):
            turn(link, wrong)
            reply = await client.ask("POST", LOAD, b"", TOKEN)
            assert reply.status == 400, wrong
            assert str(tmp_path) not in reply.body.decode()
            assert (await embedded(client)) == ("1", predicted(made))
            assert [s.version for s in app.versions.all] == ["1"]
        turn(link, made)
        assert (await client.ask("POST", LOAD, b"", TOKEN)).status == 200
        assert [line["event"] for line in client.lines].count("unchanged") == 1
        assert [line["event"] for line in client.lines].count("not_loaded") == 4

    on_loader(test, link)


def test_only_who_has_the_token_and_is_on_this_machine_loads(link: Path, second: Path) -> None:
    async def test(client: Client, app: App) -> None:
        turn(link, second)
        assert (await client.ask("POST", LOAD)).status == 401
        client.address = "192.0.2.1"
        assert (await client.ask("POST", LOAD, b"", TOKEN)).status == 403
        client.address = "::ffff:127.0.0.1"
        parameters = {"parameters": {"config": "{}"}}
        assert (await client.ask("POST", LOAD, parameters, TOKEN)).status == 400
        for name in ("..%2fsecond", "..", str(second), "other"):
            path = f"/v2/repository/models/{name}/load"
            assert (await client.ask("POST", path, b"", TOKEN)).status == 404
        assert [s.version for s in app.versions.all] == ["1"]
        assert (await client.ask("POST", LOAD, {"parameters": {}}, TOKEN)).status == 200
        assert [s.version for s in app.versions.all] == ["2"]

    on_loader(test, link)


def test_a_server_without_a_token_loads_nothing(link: Path) -> None:
    async def test(client: Client, app: App) -> None:
        assert (await client.ask("POST", LOAD)).status == 403

    on_loader(test, link, token="")


def test_two_versions_stand_beside_each_other_and_each_is_asked_by_its_number(
    made: Path, second: Path
) -> None:
    async def test(client: Client, app: App) -> None:
        assert (await embedded(client)) == ("1", predicted(made))
        two = await embedded(client, "/v2/models/tiny/versions/2/infer")
        assert two == ("2", predicted(second))
        document = (await client.ask("GET", "/v2/models/tiny", b"", TOKEN)).json
        assert document["versions"] == ["1", "2"]
        index = (await client.ask("POST", "/v2/repository/index", b"", TOKEN)).json
        assert [(i["version"], i["state"]) for i in index] == [("1", "READY"), ("2", "READY")]
        assert (await client.ask("GET", "/v2/models/tiny/versions/3", b"", TOKEN)).status == 404

    on_loader(test, made, second)


def test_another_model_stands_beside_the_first_and_openai_s_clients_name_it(
    made: Path, decoder_bundle: Path
) -> None:
    async def test(client: Client, app: App) -> None:
        models = (await client.ask("GET", "/v1/models", b"", TOKEN)).json["data"]
        assert [m["id"] for m in models] == ["tiny", "tiny-decoder"]
        body = {"model": "tiny-decoder", "prompt": "good", "max_tokens": 2, "temperature": 0}
        assert (await client.ask("POST", "/v1/completions", body, TOKEN)).status == 200
        body = {"model": "tiny", "input": "good"}
        assert (await client.ask("POST", "/v1/embeddings", body, TOKEN)).status == 200
        body = {"model": "tiny", "prompt": "good"}
        assert (await client.ask("POST", "/v1/completions", body, TOKEN)).status == 404
        body = {"model": ["tiny"], "input": "good"}
        assert (await client.ask("POST", "/v1/embeddings", body, TOKEN)).status == 404
        metrics = (await client.ask("GET", "/metrics", b"", TOKEN)).body.decode()
        assert 'model="tiny",' in metrics
        assert 'model="tiny-decoder",' in metrics

    on_loader(test, made, decoder_bundle)


def test_a_bundle_that_is_served_already_is_refused_at_the_start(made: Path) -> None:
    async def test(client: Client, app: App) -> None:
        raise AssertionError

    with pytest.raises(InputError, match="already served"):
        on_loader(test, made, made)


TRIAL = ("--max-differing", "0.2", "--same-cosine", "0.9999", "--trial")


async def loaded_and_asked(client: Client, link: Path, folder: Path) -> list[str]:
    """Versions that answered requests after a new one was loaded for trial."""
    turn(link, folder)
    assert (await client.ask("POST", LOAD, b"", TOKEN)).status == 200
    versions = []
    for _ in range(40):
        version, _ = await embedded(client)
        versions.append(version)
        await asyncio.sleep(0.002)  # the copies have the lowest priority
    return versions


def ended(client: Client, event: str) -> dict[str, Any]:
    (line,) = [line for line in client.lines if line["event"] == event]
    return line


@pytest.mark.parametrize("share", ["0", "0.5"])
def test_a_version_that_answers_otherwise_is_rolled_back(
    share: str, link: Path, second: Path
) -> None:
    async def test(client: Client, app: App) -> None:
        versions = await loaded_and_asked(client, link, second)
        while app.first_service().on_answer is not None:
            versions.append((await embedded(client))[0])
        assert (share == "0") == ("2" not in versions)
        line = ended(client, "trial_not_passed")
        assert (line["verdict"], line["differing"]) == ("fail", line["examples"])
        assert (await embedded(client))[0] == "1"
        turn(link, second)  # and may be tried again
        assert (await client.ask("POST", LOAD, b"", TOKEN)).status == 200

    on_loader(test, link, words=(*TRIAL, share))


@pytest.mark.parametrize("share", ["0", "0.5"])
def test_a_version_that_answers_alike_takes_the_old_one_s_place(
    share: str, link: Path, made: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "alike"))
    alike = edited(copy, lambda manifest: manifest.update(version="2"))

    async def test(client: Client, app: App) -> None:
        versions = await loaded_and_asked(client, link, alike)
        assert ("2" in versions[:20]) == (share != "0")
        while app.first_service().on_answer is not None:
            refused = await client.ask("POST", LOAD, b"", TOKEN)
            assert refused.status == 400  # one trial at a time
            await embedded(client)
        assert ended(client, "trial_passed")["differing"] == 0
        assert (await embedded(client))[0] == "2"
        assert [s.version for s in app.versions.all] == ["2"]
        metrics = (await client.ask("GET", "/metrics", b"", TOKEN)).body.decode()
        assert 'optimize_trial_differing_total{model="tiny",version="2"} 0' in metrics

    on_loader(test, link, words=(*TRIAL, share))


@pytest.mark.parametrize("words", [("--trial", "0"), ("--trial", "0", "--max-differing", "0.1")])
def test_a_trial_without_its_terms_is_refused_at_the_start(
    words: tuple[str, ...], made: Path
) -> None:
    async def test(client: Client, app: App) -> None:
        raise AssertionError

    with pytest.raises(InputError, match="is missing"):
        on_loader(test, made, words=words)
