"""Integers of every step of a decoder: right ones pass, and each fault is named by its length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.generate import loop
from optimizer.harness.inputs import kv_cache
from optimizer.harness.runtimes.ort.decoder import OrtDecoder
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.tasks import text_generation
from optimizer.validate.ledger.laws.decoder import step_laws
from tests.harness.tiny_decoder import contract

CONTEXT = 150


def problems(context: int = CONTEXT, kind: str = "llama") -> list[str]:
    made = contract(320, kind)
    return step_laws.find_problems(replace(made, generation=replace(made.decoder, context=context)))


@pytest.mark.parametrize("context", [2, 3, 5, 16, CONTEXT])
def test_the_harness_counts_as_is_expected_at_every_length(context: int) -> None:
    assert problems(context) == []


def test_a_model_without_positions_is_held_to_its_mask() -> None:
    assert problems(40, "opt") == []


def test_lengths_beyond_those_of_every_step_are_looked_at_and_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_laws, "DENSE", 32)
    assert problems(100) == []
    assert step_laws.describe_unseen(100).startswith("lengths from 32 to 100 tokens")
    high_beyond(64)(monkeypatch)
    assert any("after 6" in problem for problem in problems(100))


Fault = Callable[[pytest.MonkeyPatch], None]


def high_beyond(length: int) -> Fault:
    """Count positions one too high beyond `length` cached tokens, wherever they are counted."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        counted = kv_cache.position_ids

        def high(mask: Any, new: int) -> Any:
            return counted(mask, new) + int(mask.shape[1] - new > length)

        patch.setattr(kv_cache, "position_ids", high)

    return plant


def high_in_the_loop(length: int) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def high(made: Any, ids: Any, mask: Any) -> Any:
            arrays = text_generation.build_step_arrays(made, ids, mask)
            beyond = int(mask.shape[1] > length + 1)
            return {**arrays, "position_ids": arrays["position_ids"] + beyond}

        patch.setattr(loop, "build_step_arrays", high)

    return plant


def high_in_slots(length: int) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        run = OrtSlots._run

        def high(self: Any, adapter: str, row: int, ids: Any, mask: Any, positions: Any) -> Any:
            return run(self, adapter, row, ids, mask, positions + (positions > length))

        patch.setattr(OrtSlots, "_run", high)

    return plant


def high_in_the_decoder(length: int) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        step = OrtDecoder.step

        def high(self: Any, arrays: Any) -> Any:
            beyond = int(self.past > length)
            return step(self, {**arrays, "position_ids": arrays["position_ids"] + beyond})

        patch.setattr(OrtDecoder, "step", high)

    return plant


def blind_beyond(length: int) -> Fault:
    """Mask the first token of longer texts."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        inputs = text_generation._inputs

        def hidden(made: Any, ids: Any, mask: Any) -> Any:
            arrays = inputs(made, ids, mask)
            arrays["attention_mask"] = arrays["attention_mask"].copy()
            arrays["attention_mask"][:, 0] *= mask.shape[1] <= length + 1
            return arrays

        patch.setattr(text_generation, "_inputs", hidden)

    return plant


def shares_a_row(length: int) -> Fault:
    """Leave texts in place when their rows move."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        gather = OrtSlots._gather

        def only_the_names(self: Any, tokens: Any) -> Any:
            kept = {name: buffer.copy() for name, buffer in self._cache.items()}
            gather(self, tokens)
            if max(self._lengths.values()) > length:
                for name, buffer in kept.items():
                    self._cache[name][:] = buffer

        patch.setattr(OrtSlots, "_gather", only_the_names)

    return plant


@pytest.mark.parametrize(
    ("fault", "length"),
    [
        (high_beyond, 20),
        (high_beyond, 64),
        (high_beyond, CONTEXT - 2),
        (high_in_the_loop, 20),
        (high_in_the_loop, 64),
        (high_in_slots, 64),
        (high_in_the_decoder, 64),
        (blind_beyond, 64),
        (shares_a_row, 20),
    ],
)
def test_a_fault_that_begins_at_a_length_is_found_at_that_length(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[int], Fault], length: int
) -> None:
    fault(length)(monkeypatch)
    found = problems()
    assert found
    cached = {int(p.split("after ")[1].split()[0]) for p in found}
    if fault is not shares_a_row:  # rows are only moved when texts end
        assert cached & {length, length + 1}, found


def test_a_token_that_is_fed_a_step_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    last: list[Any] = []

    def late(made: Any, ids: Any, mask: Any) -> Any:
        last[:] = [*(fed for fed in last if fed.shape == ids.shape), ids][-2:]
        return text_generation.build_step_arrays(made, last[0], mask)

    monkeypatch.setattr(loop, "build_step_arrays", late)
    monkeypatch.setattr(step_laws, "_slots", lambda *_: [])
    assert any("input_ids" in problem for problem in problems(20))


def test_padding_on_the_right_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    left = text_generation._inputs

    def right(made: Any, ids: Any, mask: Any) -> Any:
        return left(made, ids, np.sort(mask, 1)[:, ::-1] if mask.shape == ids.shape else mask)

    monkeypatch.setattr(text_generation, "_inputs", right)
    assert any("tokens, shared cache" in problem for problem in problems(20)), problems(20)
