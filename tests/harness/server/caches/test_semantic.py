"""Questions that are alike: those of one frame, in bounded memory, the most alike of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from optimizer.harness.server.caches.cache import ENTRY
from optimizer.harness.server.caches.false_hits import Vectors
from optimizer.harness.server.caches.semantic import SPARE, SemanticCache

FRAMES = [b"one", b"two", b"three"]


def vector(chance: np.random.Generator) -> Vectors:
    drawn = chance.normal(size=4)
    return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def test_the_most_alike_of_the_same_frame_is_given_and_memory_is_bounded() -> None:
    chance, picks = np.random.default_rng(0), random.Random(0)
    cache = SemanticCache(12_000, 5, 0.6)
    kept: dict[bytes, list[tuple[Vectors, str]]] = {frame: [] for frame in FRAMES}
    found = 0
    for i in range(3000):
        frame, asked = picks.choice(FRAMES), vector(chance)
        if picks.random() < 0.5:
            value = f"{frame!r} {i} " + "x" * picks.randrange(600)
            cache.put("digest", frame, asked, value)
            kept[frame].append((asked, value))
        else:
            got = cache.get(frame, asked)
            similar = {v: float(k @ asked) for k, v in kept[frame]}
            if got is not None:
                found += 1
                assert got[0] in similar
                assert got[1] > 0.6
                assert abs(similar[got[0]] - got[1]) < 1e-5
        assert cache.bytes <= cache.most
        held = sum(f.vectors.nbytes for f in cache._frames.values())
        assert held <= SPARE * 16 * len(cache)
        assert all(len(f.keys) <= 5 for f in cache._frames.values())
    assert found > 200
    assert len(cache) == sum(len(f.keys) for f in cache._frames.values()) > 3


def test_the_nearest_is_taken_and_a_question_that_is_not_alike_has_none() -> None:
    cache = SemanticCache(1 << 20, 10, 0.9)
    for angle in (0.0, 0.2, 0.4):
        cache.put("d", b"f", np.array([np.cos(angle), np.sin(angle)], np.float32), angle)
    near = np.array([np.cos(0.29), np.sin(0.29)], np.float32)
    assert cache.get(b"f", near) == (0.2, float(np.float32(np.cos(0.09))))
    assert cache.get(b"f", np.array([0, 1], np.float32)) is None
    assert cache.get(b"g", near) is None


def test_what_was_used_longest_ago_makes_room_in_its_frame() -> None:
    chance, cache = np.random.default_rng(1), SemanticCache(1 << 20, 3, 0.999)
    vectors = [vector(chance) for _ in range(4)]
    for i, v in enumerate(vectors[:3]):
        cache.put("d", b"f", v, i)
    assert cache.get(b"f", vectors[0]) is not None
    cache.put("d", b"f", vectors[3], 3)
    left = [got for v in vectors if (got := cache.get(b"f", v)) is not None]
    assert sorted(value for value, _ in left) == [0, 2, 3]


def test_an_answer_made_anew_takes_the_place_of_the_one_before() -> None:
    cache, same = SemanticCache(1 << 20, 3, 0.5), np.array([1, 0], np.float32)
    cache.put("d", b"f", same, "old")
    cache.put("d", b"f", same, "new")
    assert len(cache) == 1
    assert cache.get(b"f", same) == ("new", 1.0)


def test_nothing_of_a_bundle_is_left_when_it_is_dropped() -> None:
    chance, cache = np.random.default_rng(2), SemanticCache(1 << 20, 10, 0.999)
    some: list[Any] = [(owner, vector(chance)) for owner in "ababa"]
    for owner, v in some:
        cache.put(owner, owner.encode(), v, owner)
    cache.drop("a")
    assert len(cache) == 2
    assert [cache.get(o.encode(), v) is None for o, v in some] == [True, False, True, False, True]
    cache.drop("b")
    assert (len(cache), cache.bytes) == (0, 0)


def test_an_answer_larger_than_all_room_puts_nothing_out() -> None:
    cache, one = SemanticCache(3000, 10, 0.5), np.array([1, 0], np.float32)
    cache.put("d", b"f", one, "kept")
    cache.put("d", b"f", np.array([0, 1], np.float32), "x" * 3000)
    assert cache.get(b"f", one) == ("kept", 1.0)
    assert ENTRY < cache.bytes <= 3000
