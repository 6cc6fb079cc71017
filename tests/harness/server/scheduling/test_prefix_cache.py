"""Prompts with a common prefix: it is prefilled once, and no bit changes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.errors import InputError
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.server.scheduling.prefix_cache import ENTRY, PrefixCache
from optimizer.harness.server.scheduling.slots import (
    GenerationJob,
    SlotLimits,
    SlotScheduler,
    cut_pieces,
)
from optimizer.harness.server.warm_up import generation
from tests.harness.server.scheduling.test_decoding import engine_of, expected, text_of
from tests.harness.server.scheduling.test_slots import COSTS, PIECE, WHOLE
from tests.harness.server.serving import Client, on_server
from tests.harness.server.warm_up.test_generation import opened
from tests.package.bundles import small_bundle

TOKEN = 8  # bytes of the cache of one


class Slots:
    """Whose cache of a token is the token."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}

    def copy_tokens(self, text: int, start: int, stop: int) -> list[Any]:
        return [np.array([self.texts[text][start:stop]], np.int64)]

    def append(self, text: int, arrays: Sequence[Any]) -> None:
        self.texts[text] += arrays[0][0].tolist()


def read(prefixes: PrefixCache, slots: Slots, ids: Sequence[int]) -> int:
    """Read a prompt as a server does; how many tokens were not computed."""
    number, kept = len(slots.texts), prefixes.length(ids)
    slots.texts[number] = []
    prefixes.restore(number, ids, kept)
    for start, stop in cut_pieces(len(ids), prefixes.piece, WHOLE):
        if start >= kept:
            slots.texts[number] += ids[start:stop]
            prefixes.keep(number, ids, start, stop)
    assert slots.texts[number] == list(ids)
    return kept


def made(most: int = 1 << 20) -> tuple[PrefixCache, Slots]:
    slots = Slots()
    return PrefixCache(slots, 16, most), slots  # type: ignore[arg-type]


def test_the_whole_pieces_that_two_prompts_begin_with_are_read_once() -> None:
    prefixes, slots = made()
    first = list(range(50))
    assert read(prefixes, slots, first) == 0
    assert read(prefixes, slots, [*first[:40], 99, 98]) == 32
    assert read(prefixes, slots, [99, *first[1:]]) == 0


def test_a_prefix_of_one_adapter_is_not_given_to_another() -> None:
    prefixes, slots = made()
    ids = list(range(50))
    read(prefixes, slots, ids)
    assert (prefixes.length(ids), prefixes.length(ids, "sql")) == (48, 0)


@pytest.mark.parametrize("length", [15, 16, 17, 18, 32, 33, 34, 48])
def test_the_last_piece_is_always_read(length: int) -> None:
    prefixes, slots = made()
    read(prefixes, slots, list(range(100)))
    assert read(prefixes, slots, list(range(length))) == cut_pieces(length, 16, WHOLE)[-1][0]


def test_random_prompts_have_their_own_cache_within_the_memory() -> None:
    """`read` compares every slot with its prompt."""
    draw, most = random.Random(0), 20 * (16 * TOKEN + ENTRY)
    prefixes, slots = made(most)
    systems = [[draw.randrange(3) for _ in range(draw.randrange(10, 200))] for _ in range(6)]
    kept = 0
    for _ in range(300):
        system = draw.choice(systems)
        own = [draw.randrange(3) for _ in range(draw.randrange(1, 60))]
        kept += read(prefixes, slots, system[: draw.randrange(1, len(system) + 1)] + own)
        assert prefixes.bytes <= most
        assert prefixes.bytes == len(prefixes) * (16 * TOKEN + ENTRY)
    assert kept > 0


def test_what_was_used_longest_ago_makes_room_and_a_beginning_last() -> None:
    prefixes, slots = made(4 * (16 * TOKEN + ENTRY))
    system, other = [1] * 50, [2] * 34
    read(prefixes, slots, system)  # three pieces
    read(prefixes, slots, other)  # two more: the end of the first makes room
    assert prefixes.length(other) == 32
    assert prefixes.length(system) == 32


def test_a_piece_that_is_larger_than_all_room_is_not_kept() -> None:
    prefixes, slots = made(16 * TOKEN)
    assert read(prefixes, slots, [1] * 40) == read(prefixes, slots, [1] * 40) == 0
    assert (len(prefixes), prefixes.bytes) == (0, 0)


def test_a_scheduler_reads_what_is_not_kept() -> None:
    limits = SlotLimits(4, 1000, 30.0, PIECE)
    scheduler = SlotScheduler(limits, COSTS, WHOLE, lambda job: 2 * PIECE if job.prompt > 70 else 0)
    long, short = GenerationJob(100, 1), GenerationJob(60, 1)
    scheduler.submit(0.0, [long, short])
    reads = []
    for _ in range(6):
        turn = scheduler.schedule(0.0)
        reads += [turn.prefill] if turn.prefill else []
        scheduler.postprocess(turn.decode)
    assert reads == [(long, 64, 96), (long, 96, 100), (short, 0, 32), (short, 32, 60)]


def test_answers_are_those_of_predict_and_beginnings_are_not_read_again(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_piece", lambda *_: 16)
    system = "a good film with a bad story "
    prompts = [system * 2 + end for end in ("good", "bad", "never again", "no")] * 2

    async def test(client: Client) -> None:
        engine = engine_of(client)
        (line,) = [line for line in client.lines if line["event"] == "warmed_up"]
        assert (line["prefixes"], line["sharing"]) == (True, "equal")
        tasks = [client.complete(p, max_tokens=6, temperature=0) for p in prompts]
        texts = [text_of(reply) for reply in await asyncio.gather(*tasks)]
        assert texts == expected(decoder_bundle, prompts, max_new_tokens=6, temperature=0)
        lengths = [len(ids) for ids in engine.model.prompts(prompts)]
        await asyncio.sleep(0)
        queries, hits = (
            float(m.lines({})[0].split()[-1])
            for m in (engine.metrics.prefix_queries, engine.metrics.prefix_hits)
        )
        assert queries == sum(lengths)
        assert hits >= 16 * (len(prompts) - 1)

    on_server(decoder_bundle, test, "--prefix-cache-mib", "8")


def test_where_a_copy_changes_a_bit_beginnings_are_not_kept(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = OrtSlots.append

    def rounded(self: OrtSlots, text: int, arrays: Any) -> None:
        append(self, text, [np.nextafter(array, np.float32(9)) for array in arrays])

    with opened(decoder_bundle) as model:
        generation.measure_model(model, "exact")
        assert generation.prefixes_hold(model, 16)
        monkeypatch.setattr(OrtSlots, "append", rounded)
        assert not generation.prefixes_hold(model, 16)


def test_a_model_that_answers_in_one_run_has_no_prompts(tmp_path: Path) -> None:
    async def test(client: Client) -> None:
        raise AssertionError(client)

    with pytest.raises(InputError, match="prefix-cache-mib"):
        on_server(small_bundle.make(tmp_path) / "bundle", test, "--prefix-cache-mib", "8")
