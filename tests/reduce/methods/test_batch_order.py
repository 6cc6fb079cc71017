"""Each text has its place in the steps of an epoch."""

import pytest

from optimizer.reduce.methods.batch_order import choose_batch, count_steps

LENGTHS = [(7 * i * i) % 113 + 1 for i in range(1000)]


def epoch(number: int, batch_size: int = 8, seed: int = 0) -> list[list[int]]:
    steps = count_steps(len(LENGTHS), batch_size)
    return [choose_batch(number * steps + i, LENGTHS, batch_size, seed) for i in range(steps)]


def test_an_epoch_sees_every_text_once() -> None:
    assert sorted(i for batch in epoch(0) for i in batch) == list(range(1000))


def test_texts_of_one_batch_have_like_lengths() -> None:
    spread = [max(LENGTHS[i] for i in b) - min(LENGTHS[i] for i in b) for b in epoch(0)]
    assert sum(spread) / len(spread) < (max(LENGTHS) - min(LENGTHS)) / 8


def test_epochs_and_seeds_differ_and_a_step_is_always_the_same() -> None:
    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=1)


def test_fewer_texts_than_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="3 texts are fewer than a batch of 8"):
        choose_batch(0, [1, 2, 3], 8, 0)
