"""A cached answer is returned in every bit, and only to the same request."""

import random
from typing import Any

from optimizer.harness.server.caches.cache import ENTRY, Cache, cache_key, size
from optimizer.harness.server.refusals import OverloadError
from tests.harness.server.serving import Client
from tests.harness.server.versions.test_loader import (  # noqa: F401 - fixtures
    LOAD,
    TOKEN,
    embedded,
    link,
    on_loader,
    predicted,
    second,
    turn,
)


def test_it_never_holds_more_bytes_than_it_may_and_keeps_what_was_used_last() -> None:
    chance, cache, last = random.Random(0), Cache(20_000), dict[bytes, Any]()
    for _ in range(2000):
        key = b"%d" % chance.randrange(60)
        if chance.random() < 0.5:
            last[key] = ["x" * chance.randrange(3000)]
            cache.put(key, last[key])
        else:
            assert cache.get(key) in (None, last.get(key))
        assert cache.bytes <= cache.most
    assert cache.bytes == sum(size(v) + ENTRY for v, _ in cache._entries.values())
    cache.put(b"used", ["a"])
    while cache.get(b"0") is not None or len(cache) > 3:
        cache.get(b"used")
        cache.put(b"%d" % chance.randrange(1000, 9999), ["y" * 6000])
    assert cache.get(b"used") == ["a"]


def test_an_answer_larger_than_all_room_is_not_kept_and_puts_nothing_out() -> None:
    cache = Cache(5000)
    cache.put(b"a", [1.0])
    cache.put(b"b", ["x" * 6000])
    assert cache.get(b"b") is None
    assert cache.get(b"a") == [1.0]


def test_requests_that_differ_in_anything_have_different_keys() -> None:
    requests = [
        ("d", "e", ["a", "b"], None),
        ("d", "e", ["ab"], None),
        ("d", "e", ["a"], ["b"]),
        ("d", "e", ["b", "a"], None),
        ("d", "e", ["a", "b", ""], None),
        ("d", "e", ["a", ""], ["b", ""]),
        ("d", "e", [b"a", b"b"], None),
        ("d", "f", ["a", "b"], None),
        ("x", "e", ["a", "b"], None),
        ("de", "", ["a", "b"], None),
        ("d", "e", ["a1:b"], None),
        ("d", "e", ["a", "b "], None),
    ]
    keys = {cache_key(*request) for request in requests} | {cache_key(*requests[0], "options")}
    assert len(keys) == len(requests) + 1
    assert cache_key(*requests[0]) == cache_key("d", "e", ["a", "b"], None)


def refuses(client: str) -> None:
    del client
    raise OverloadError("the queue is full", retry_after=1.0)


async def counted(client: Client, name: str, version: str) -> int:
    metrics = (await client.ask("GET", "/metrics", b"", TOKEN)).body.decode()
    labels = f'{name}{{model="tiny",version="{version}"}} '
    return int(float(metrics.split(labels)[1].split()[0]))


def test_a_cached_answer_is_predict_s_and_a_new_version_answers_itself(
    link: Any,  # noqa: F811
    made: Any,
    second: Any,  # noqa: F811
) -> None:
    async def test(client: Client, app: Any) -> None:
        for n in range(3):
            assert await embedded(client) == ("1", predicted(made))
            assert await counted(client, "nv_cache_num_hits_per_model", "1") == n
            assert await counted(client, "nv_inference_count", "1") == 1
        assert await counted(client, "nv_cache_num_misses_per_model", "1") == 1
        openai = {"model": "tiny", "input": "a good film"}
        reply = await client.ask("POST", "/v1/embeddings", openai, TOKEN)
        assert reply.json["data"][0]["embedding"] == predicted(made)
        assert reply.json["usage"]["prompt_tokens"] == 5
        assert await counted(client, "nv_inference_count", "1") == 1
        engine, admit = app.first_service().engine, app.first_service().engine.admit
        engine.admit = refuses  # a kept answer is given under overload, too; others are not
        assert await embedded(client) == ("1", predicted(made))
        other = {"model": "tiny", "input": "a bad film"}
        assert (await client.ask("POST", "/v1/embeddings", other, TOKEN)).status == 429
        engine.admit = admit
        turn(link, second)
        assert (await client.ask("POST", LOAD, b"", TOKEN)).status == 200
        assert await embedded(client) == ("2", predicted(second))
        assert await counted(client, "nv_cache_num_hits_per_model", "2") == 0

    on_loader(test, link, words=("--cache-mib", "1"))


def test_without_the_option_nothing_is_kept(made: Any) -> None:
    async def test(client: Client, app: Any) -> None:
        for n in range(2):
            await embedded(client)
            assert await counted(client, "nv_inference_count", "1") == n + 1

    on_loader(test, made)
