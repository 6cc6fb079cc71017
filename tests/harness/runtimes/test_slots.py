"""Texts that come and go: each has the scores that it has alone, in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.runtimes.slots import SeparateDecoders, Slots
from tests.harness import tiny_decoder

PIECE, TOKENS, ROWS = 4, 5, 3
LENGTHS = (10, 4, 8, 1, 16, 6, 2)  # of the prompts; pieces of one token would be another kernel
CAPACITY = max(LENGTHS) + TOKENS


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
    shared: OrtRunner, contract: Contract, seed: int
) -> None:
    slots = shared.slots(contract, ROWS, CAPACITY)
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
    shared: OrtRunner, contract: Contract
) -> None:
    one, other, _ = texts = prompts(contract.decoder.vocabulary)[:3]
    expected = alone(shared.slots(contract, 1, CAPACITY), one)
    slots = OrtSlots(shared, contract, ROWS, CAPACITY)
    scores = [read(slots, 0, one)]
    read(slots, 1, other)
    for _ in range(TOKENS - 1):
        token = int(scores[-1].argmax())
        slots.step({0: texts[2][0], 1: token})
        slots.undo(0)
        scores.append(slots.step({0: token})[0])
    assert same([scores], [expected])
