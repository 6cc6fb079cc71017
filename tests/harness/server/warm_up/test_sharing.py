"""Sharing of batches is measured: padding and mixing are detected."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.model import RequestLimits, ServedModel, difference
from optimizer.harness.server.warm_up.sharing import sizes
from optimizer.harness.server.warm_up.warm_up import (
    CHECK,
    COMPARE,
    TIME,
    WarmUpProgress,
    lengths,
    rows_of,
    warm_up,
)


@pytest.fixture
def model(made: Path) -> ServedModel:
    return ServedModel(Bundle(made), RequestLimits(8))


def mixed(model: ServedModel, scale: float) -> None:
    """Let each row depend on its batch, as dynamic quantization per tensor does."""
    infer = model.predictor.infer

    def mixing(arrays: Mapping[str, Any]) -> dict[str, Any]:
        outputs = infer(arrays)
        rows = len(next(iter(arrays.values())))
        return {n: a * np.float32(1 + scale * (rows - 1)) for n, a in outputs.items()}

    model.predictor = replace(model.predictor, infer=mixing)


def test_rows_of_equal_length_share_a_batch_where_that_changes_no_bit(model: ServedModel) -> None:
    _, sharing = warm_up(model, 4, "exact")
    assert (sharing.how, sharing.difference, model.sharing) == ("equal", 0.0, "equal")
    short, long = (rows_of(model, n, 1)[0] for n in (8, 9))
    assert model.bucket(short) != model.bucket(long)
    assert model.bucket(short) == model.bucket(rows_of(model, 8, 2)[1])


def test_rows_run_alone_where_a_batch_changes_them(model: ServedModel) -> None:
    model.contract = replace(model.contract, normalize=False)
    model.predictor = replace(model.predictor, contract=model.contract)
    mixed(model, 1e-3)
    _, sharing = warm_up(model, 4, "exact")
    assert (sharing.how, model.sharing) == ("alone", "alone")
    row = rows_of(model, 8, 1)[0]
    assert model.bucket(row) != model.bucket(row)


def test_padded_rows_share_batches_of_like_length_and_the_difference_is_said(
    model: ServedModel,
) -> None:
    model.contract = replace(model.contract, normalize=False)
    model.predictor = replace(model.predictor, contract=model.contract)
    mixed(model, 1e-3)
    _, sharing = warm_up(model, 4, "padded")
    assert sharing.how == "padded"
    assert 1e-4 < sharing.difference < 1e-1
    assert model.bucket(rows_of(model, 8, 1)[0]) == model.bucket(rows_of(model, 9, 1)[0])
    assert model.bucket(rows_of(model, 9, 1)[0])[1] >= 9


def test_texts_to_warm_up_with_have_the_length_and_differ(model: ServedModel) -> None:
    for length in lengths(32):
        rows = rows_of(model, length, 4)
        assert [row.size for row in rows] == [length] * 4
        assert len({tuple(row.encoding.ids) for row in rows}) == 4


def test_the_difference_of_two_answers_is_that_of_their_numbers() -> None:
    answer = {"label": "a", "scores": {"a": 0.5, "b": [1.0, 2.0]}}
    assert difference(answer, answer) == 0
    assert difference(answer, {"label": "a", "scores": {"a": 0.5, "b": [1.0, 2.5]}}) == 0.5
    assert difference(answer, {**answer, "label": "b"}) == float("inf")
    assert difference({"x": [1.0]}, {"x": [1.0, 2.0]}) == float("inf")


@pytest.mark.parametrize("tokens", [8, 128, 512])
def test_every_batch_that_is_timed_was_compared_before(tokens: int) -> None:
    for rows in range(2, 20):
        assert {max(2, rows // 2), rows} <= set(sizes(tokens, rows))


def test_long_inputs_are_compared_in_fewer_batches() -> None:
    assert sizes(32, 8) == [2, 3, 4, 5, 6, 7, 8]
    assert sizes(512, 8) == [2, 3, 4, 8]


def test_steps_tell_the_time_left_from_the_tokens_that_were_run() -> None:
    now, told = 0.0, list[tuple[str, int, int, float | None]]()
    tokens = {(CHECK, 8): 16, (CHECK, 32): 64, (COMPARE, 8): 80, (TIME, 8): 40}
    steps = WarmUpProgress(tokens, lambda *step: told.append(step), lambda: now)
    for kind, length in tokens:
        steps.start(kind, length)
        now += 2.0
    assert told == [
        (f"{CHECK}: length 8", 1, 4, None),
        (f"{CHECK}: length 32", 2, 4, None),
        (f"{COMPARE}: length 8", 3, 4, pytest.approx(4.0 * 120 / 80)),
        (f"{TIME}: length 8", 4, 4, pytest.approx(6.0 * 40 / 160)),
    ]
