"""Texts that come and go: each has the scores that it has alone, in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.contract import Contract
from optimizer.harness.errors import MachineError
from optimizer.harness.runtimes.ort.bound import UNCAPTURED
from optimizer.harness.runtimes.ort.device_slots import DeviceSlots
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.slots import SeparateDecoders, Slots
from tests.harness import tiny_decoder

PIECE, TOKENS, ROWS = 4, 5, 3
LENGTHS = (10, 4, 8, 1, 16, 6, 2)  # of the prompts; pieces of one token would be another kernel
CAPACITY = max(LENGTHS) + TOKENS


@pytest.fixture(scope="module")
def fixed(decoder_folder: Path) -> OrtRunner:
    """The model of `shared`, with steps as on a GPU."""
    return OrtRunner(decoder_folder / "shared.onnx", threads=1, fixed=True)


@pytest.fixture(params=["shared", "fixed"])
def batching(request: pytest.FixtureRequest) -> OrtRunner:
    """A runner whose texts share steps."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def prompts(vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocabulary, n).tolist() for n in LENGTHS]


def read(slots: Slots, text: int, prompt: list[int]) -> Any:
    slots.open(text)
    return [slots.read(text, prompt[i : i + PIECE]) for i in range(0, len(prompt), PIECE)][-1]


def alone(slots: Slots, prompt: list[int]) -> list[Any]:
    """The scores of the likeliest continuation."""
    scores = [read(slots, 0, prompt)]
    for _ in range(TOKENS - 1):
        scores.append(slots.step({0: int(scores[-1].argmax())})[0])
    slots.close(0)
    return scores


def arriving(slots: Slots, waiting: list[list[int]], seed: int) -> list[list[Any]]:
    """The same of texts that come at random, at most ROWS at once."""
    random, scores = np.random.default_rng(seed), [list[Any]() for _ in waiting]
    going, come = set[int](), 0
    while going or come < len(waiting):
        if come < len(waiting) and len(going) < ROWS and random.random() < 0.6:
            scores[come].append(read(slots, come, waiting[come]))
            going.add(come)
            come += 1
        if going:
            tokens = {text: int(scores[text][-1].argmax()) for text in going}
            for text, row in slots.step(tokens).items():
                scores[text].append(row)
        for text in [t for t in going if len(scores[t]) == TOKENS]:
            slots.close(text)
            going.remove(text)
    return scores


def same(ours: list[list[Any]], theirs: list[list[Any]]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("seed", range(4))
def test_any_arrival_pattern_gives_each_text_its_own_scores(
    batching: OrtRunner, shared: OrtRunner, contract: Contract, seed: int
) -> None:
    slots = batching.slots(contract, ROWS, CAPACITY)
    assert slots.together
    texts = prompts(contract.decoder.vocabulary)
    expected = [alone(shared.slots(contract, 1, CAPACITY), text) for text in texts]
    assert same(arriving(slots, texts, seed), expected)


def test_decoders_of_their_own_give_the_same_texts(runner: OrtRunner, contract: Contract) -> None:
    slots = runner.slots(contract, ROWS, CAPACITY)
    assert isinstance(slots, SeparateDecoders)
    texts = prompts(contract.decoder.vocabulary)
    expected = [alone(runner.slots(contract, 1, CAPACITY), text) for text in texts]
    assert same(arriving(slots, texts, 0), expected)


def test_a_graph_with_one_length_for_all_rows_gives_other_scores(
    decoder_folder: Path, contract: Contract
) -> None:
    vocabulary = contract.decoder.vocabulary
    model = tiny_decoder.write_onnx(decoder_folder / "one.onnx", vocabulary, "one length")
    old = OrtRunner(model, threads=1)
    texts = prompts(vocabulary)
    expected = [alone(old.slots(contract, 1, CAPACITY), text) for text in texts]
    assert not same(arriving(old.slots(contract, ROWS, CAPACITY), texts, 0), expected)


def test_a_step_that_is_undone_and_done_again_changes_nothing(
    batching: OrtRunner, shared: OrtRunner, contract: Contract
) -> None:
    one, other, _ = texts = prompts(contract.decoder.vocabulary)[:3]
    expected = alone(shared.slots(contract, 1, CAPACITY), one)
    slots = batching.slots(contract, ROWS, CAPACITY)
    scores = [read(slots, 0, one)]
    read(slots, 1, other)
    for _ in range(TOKENS - 1):
        token = int(scores[-1].argmax())
        slots.step({0: texts[2][0], 1: token})
        slots.undo(0)
        scores.append(slots.step({0: token})[0])
    assert same([scores], [expected])


def test_tokens_copied_from_one_slot_to_another_give_its_scores(
    batching: OrtRunner, contract: Contract
) -> None:
    slots = batching.slots(contract, ROWS, CAPACITY)
    one, other, _ = prompts(contract.decoder.vocabulary)[:3]
    read(slots, 0, other)  # another row than the first
    scores = read(slots, 1, one)
    slots.open(2)
    for start in (0, PIECE):
        slots.append(2, slots.copy_tokens(1, start, start + PIECE))
    np.testing.assert_array_equal(slots.read(2, one[2 * PIECE :]), scores)


def test_a_full_text_that_is_idle_changes_no_score(batching: OrtRunner, contract: Contract) -> None:
    one, other, more = prompts(contract.decoder.vocabulary)[:3]
    scores = []
    for first in (other, one):
        slots = batching.slots(contract, 2, len(one))
        slots.multiple = 2
        read(slots, 0, first)
        read(slots, 1, more)
        scores.append(slots.step({1: 3})[1])
    np.testing.assert_array_equal(*scores)
    slots.undo(0)
    full = slots.step({0: one[-1]})[0]
    again = batching.slots(contract, 2, len(one))
    again.multiple = 2
    read(again, 0, one[:-1])
    np.testing.assert_allclose(again.step({0: one[-1]})[0], full, atol=2e-5)  # other pieces


def test_a_step_on_the_device_is_one_graph_for_one_text_and_one_for_several(
    decoder_folder: Path, contract: Contract
) -> None:
    graphs = []

    class Recording(OrtRunner):
        def run_bound(self, binding: Any, graph: int = UNCAPTURED) -> None:
            graphs.append(graph)
            super().run_bound(binding, graph)

    slots = Recording(decoder_folder / "shared.onnx", threads=1, fixed=True).slots(contract, 8, 9)
    for text in range(4):
        slots.open(text)
        slots.read(text, [3, 4])
    assert set(graphs) <= {UNCAPTURED}
    graphs.clear()
    for texts in ([2], [0, 1], [2], [0, 1, 2, 3], [1, 3], [2]):
        slots.step(dict.fromkeys(texts, 5))
    one, several = graphs[0], graphs[1]
    assert graphs == [one, several, one, several, several, one]
    assert UNCAPTURED not in (one, several)
    assert one != several


def test_slots_that_are_gone_release_their_graphs(
    decoder_folder: Path, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text of a prompt lookup has slots of its own."""
    released: list[int] = []
    monkeypatch.setattr(OrtRunner, "_release", lambda _, graph: released.append(graph))
    runner = OrtRunner(decoder_folder / "shared.onnx", threads=1, fixed=True)
    slots = runner.slots(contract, 2, 9)
    for text in range(2):
        slots.open(text)
        slots.read(text, [3, 4])
    slots.step({0: 5, 1: 5})
    slots.step({1: 5})
    assert released == []
    del slots
    assert len(set(released)) == 2


def test_a_closed_slot_on_the_device_leaves_nothing_to_the_next_text(
    fixed: OrtRunner, contract: Contract
) -> None:
    """0 * NaN is NaN, and a kernel for a GPU may multiply what the mask hides."""
    slots = fixed.slots(contract, 2, CAPACITY)
    assert isinstance(slots, DeviceSlots)
    for text in (0, 1):
        slots.open(text)
        slots.append(
            text, [np.full_like(a, np.nan) for a in slots.copy_tokens(text, 0, CAPACITY - 1)]
        )
    slots.undo(1, CAPACITY - 2)
    for text in (0, 1):
        slots.close(text)
    assert not any(value.numpy().any() for value in slots._cache.values())


def test_the_bytes_of_slots_on_the_device_are_those_of_its_buffers(
    fixed: OrtRunner, contract: Contract
) -> None:
    slots = fixed.slots(contract, 3, CAPACITY)
    assert isinstance(slots, DeviceSlots)
    size = sum(value.tensor_size_in_bytes() for value in slots._cache.values())
    assert size == 3 * fixed.cache_bytes(contract, CAPACITY)


def test_slots_that_the_device_does_not_allocate_are_refused_with_their_size(
    fixed: OrtRunner, contract: Contract, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(array: Any) -> None:
        raise RuntimeError("Failed to allocate memory\nmore")

    monkeypatch.setattr(fixed, "value", fail)
    with pytest.raises(MachineError, match=r"2 slots of 4,096 tokens take 4 MiB") as e:
        fixed.slots(contract, 2, 4096)
    assert "fewer --slots" in str(e.value)
