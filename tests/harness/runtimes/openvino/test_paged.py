"""Texts in OpenVINO's paged KV cache do not depend on the other texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from optimizer.export import onnx_file
from optimizer.harness.errors import InputError
from optimizer.harness.inputs import kv_cache
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.openvino.run import OpenVinoRunner, OpenVinoSettings
from optimizer.harness.runtimes.slots import SeparateDecoders, Slots
from optimizer.lower.openvino import attention
from tests.harness import tiny_decoder
from tests.lower.decoder_graphs import CONTEXT, KV_HEADS, VOCABULARY, WIDTH, decoder

CONTRACT = tiny_decoder.contract(VOCABULARY, kv_heads=KV_HEADS, head_dim=WIDTH, context=CONTEXT)
ROUNDING = {"rtol": 1e-4, "atol": 1e-4}
LENGTHS = (5, 40, 33, 1, 64)  # some fill their blocks of 32, some begin another


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged")
    graph = decoder("llama", folder).model
    assert not attention.fuse(graph, CONTEXT)[1]
    onnx_file.save(graph, folder / "fused.onnx")
    return folder / "fused.onnx"


@pytest.fixture(scope="module")
def runner(model: Path) -> OpenVinoRunner:
    return OpenVinoRunner(model, OpenVinoSettings(paged=True), threads=1)


@pytest.fixture(scope="module")
def on_threads(model: Path) -> dict[int, OpenVinoRunner]:
    """By their number."""
    settings = OpenVinoSettings(paged=True, block=64)
    return {n: OpenVinoRunner(model, settings, threads=n) for n in (1, 2)}


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    draw = np.random.default_rng(3)
    return [draw.integers(1, VOCABULARY, n + 4).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def expected(runner: OpenVinoRunner, texts: list[list[int]]) -> list[list[Array]]:
    """Scores after the prompt of each and after each of four tokens, by a cache of states."""
    alone = OpenVinoRunner(runner.model, threads=1)
    slots = SeparateDecoders(alone, CONTRACT, 96)
    rows = []
    for i, (text, n) in enumerate(zip(texts, LENGTHS, strict=True)):
        slots.open(i)
        rows.append([slots.read(i, text[:n]), *(slots.step({i: t})[i] for t in text[n:])])
    return rows


def close(ours: Array, theirs: Array) -> None:
    np.testing.assert_allclose(ours, theirs, **ROUNDING)


def test_texts_that_come_and_go_are_what_each_is_alone(
    runner: OpenVinoRunner, texts: list[list[int]], expected: list[list[Array]]
) -> None:
    """Two places for five texts: each takes blocks that others have left."""
    slots, waiting, at = runner.slots(CONTRACT, 2, 68), list(range(len(texts))), dict[int, int]()
    assert slots.together
    while waiting or at:
        if waiting and len(at) < 2:
            i = waiting.pop(0)
            slots.open(i)
            close(slots.read(i, texts[i][: LENGTHS[i]]), expected[i][0])
            at[i] = 0
        scores = slots.step({i: texts[i][LENGTHS[i] + n] for i, n in at.items()})
        for i in list(at):
            at[i] += 1
            close(scores[i], expected[i][at[i]])
            if at[i] == 4:
                slots.close(i)
                del at[i]


def test_rows_padded_on_the_left_are_what_the_portable_form_says(runner: OpenVinoRunner) -> None:
    ids = np.random.default_rng(1).integers(1, VOCABULARY, (2, 8))
    mask = (np.arange(8)[None] >= np.array([[0], [3]])).astype(np.int64)
    with OpenVinoRunner(runner.model, threads=1) as states:
        decoders = [r.decoder(CONTRACT) for r in (runner, states)]
        answers, expected = (
            np.concatenate([d.step(columns(ids, *part, mask)) for part in ((0, 6), (6, 8))], 1)
            for d in decoders
        )
        close(answers[mask.astype(bool)], expected[mask.astype(bool)])
        assert not answers[~mask.astype(bool)].any()
        ours, theirs = (d.cache() for d in decoders)
        for name, array in ours.items():
            close(array[0], theirs[name][0])
            close(array[1][:, 3:], theirs[name][1][:, 3:])
    assert len(ours) == len(theirs) > 0


def begun(runner: OpenVinoRunner, texts: list[list[int]], multiple: int) -> Slots:
    slots = runner.slots(CONTRACT, 4, 68)
    slots.multiple = multiple
    for i in range(3):
        slots.open(i)
        slots.read(i, texts[i][: LENGTHS[i]])
    return slots


def test_rows_that_run_for_nothing_leave_nothing(
    runner: OpenVinoRunner, texts: list[list[int]], expected: list[list[Array]]
) -> None:
    slots = begun(runner, texts, multiple=4)
    for n in range(4):
        scores = slots.step({i: texts[i][LENGTHS[i] + n] for i in range(3)})
        assert set(scores) == {0, 1, 2}
        for i in range(3):
            close(scores[i], expected[i][n + 1])


def test_a_token_taken_back_is_as_if_it_had_not_been(
    runner: OpenVinoRunner, texts: list[list[int]]
) -> None:
    slots = begun(runner, texts, multiple=1)
    once = slots.step({1: texts[1][LENGTHS[1]]})[1].copy()
    slots.undo(1)
    slots.step({1: 7})
    slots.undo(1)
    assert np.array_equal(slots.step({1: texts[1][LENGTHS[1]]})[1], once)


def test_what_a_text_takes_is_whole_blocks_in_the_precision_of_the_cache(
    model: Path, runner: OpenVinoRunner, texts: list[list[int]]
) -> None:
    def kept(runner: OpenVinoRunner) -> int:
        slots = runner.slots(CONTRACT, 1, 64)
        slots.open(0)
        slots.read(0, texts[4][:64])
        return sum(array.nbytes for array in slots.copy_tokens(0, 0, 64))

    rounded = OpenVinoRunner(model, OpenVinoSettings(paged=True, cache="int8"), threads=1)
    for each in (runner, rounded):
        assert each.cache_bytes(CONTRACT, 33) == each.cache_bytes(CONTRACT, 64)
    assert runner.cache_bytes(CONTRACT, 64) == kept(runner)
    scales = 8 * CONTRACT.decoder.layers * KV_HEADS * WIDTH  # of keys, for a channel and block
    assert rounded.cache_bytes(CONTRACT, 64) == kept(rounded) + scales * 2


@pytest.mark.parametrize("kept", [32, 40])
def test_tokens_copied_from_another_text_are_as_if_they_had_been_read(
    runner: OpenVinoRunner, texts: list[list[int]], kept: int
) -> None:
    slots, text = runner.slots(CONTRACT, 2, 68), texts[4]
    for i in (0, 1):
        slots.open(i)
    slots.read(0, text[:kept])
    slots.append(1, slots.copy_tokens(0, 0, 10))
    slots.append(1, slots.copy_tokens(0, 10, kept))
    assert np.array_equal(slots.read(1, text[kept:]), slots.read(0, text[kept:]))


def test_more_tokens_than_room_was_made_for_change_nothing(runner: OpenVinoRunner) -> None:
    ids = np.random.default_rng(5).integers(1, VOCABULARY, (1, 96))
    steps = []
    for capacity in (1, 96):
        decoder = runner.decoder(CONTRACT, capacity)
        steps.append([decoder.step(columns(ids, i, i + 24)) for i in range(0, 96, 24)])
    assert np.array_equal(np.concatenate(steps[0], 1), np.concatenate(steps[1], 1))


@pytest.mark.parametrize("threads", [1, 2])
def test_with_a_companion_neither_the_others_nor_the_threads_change_a_bit(
    on_threads: dict[int, OpenVinoRunner], threads: int
) -> None:
    """Two threads add up two and one of a text's three blocks; of eight texts each has four."""
    draw = np.random.default_rng(3)
    texts = [draw.integers(1, VOCABULARY, n).tolist() for n in (5, 88, 70, 1, 92, 40, 33, 90)]
    after = draw.integers(1, VOCABULARY, (4, len(texts))).tolist()
    one, other = (on_threads[n].slots(CONTRACT, len(texts), CONTEXT) for n in (threads, 1))
    for i, text in enumerate(texts):
        other.open(i)
        other.read(i, text)
    steps = [other.step(dict(enumerate(tokens))) for tokens in after]
    for i, text in enumerate(texts):
        one.open(i)
        one.read(i, text)
        for tokens, together in zip(after, steps, strict=True):
            assert np.array_equal(one.step({i: tokens[i]})[i], together[i])


def columns(ids: Array, start: int, end: int, seen: Array | None = None) -> dict[str, Array]:
    mask = np.ones((len(ids), end), np.int64) if seen is None else seen[:, :end].copy()
    positions = kv_cache.position_ids(mask, end - start)
    return {"input_ids": ids[:, start:end], "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize(("name", "change"), [("attention_mask", -1), ("position_ids", 1)])
def test_arrays_that_a_paged_cache_cannot_follow_are_refused(
    runner: OpenVinoRunner, name: str, change: int
) -> None:
    ids = np.full((1, 8), 3)
    decoder = runner.decoder(CONTRACT)
    decoder.step(columns(ids, 0, 5))
    arrays = columns(ids, 5, 8)
    arrays[name][0, 0] += change
    with pytest.raises(InputError, match=name):
        decoder.step(arrays)
