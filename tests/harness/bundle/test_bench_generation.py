"""Timing of text generation: the calls of each system, and the figures computed from them."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.harness.bundle import bench_generation
from optimizer.harness.bundle.bench_generation import measure_generation
from optimizer.harness.errors import InputError
from optimizer.harness.generate import loop
from optimizer.harness.inputs.batch import Array
from tests.harness.tiny_decoder import ScriptRunner

PROMPTS = ["the film was good", "a bad place"]


class Clock:
    """Time that passes only when a system says so."""

    now = 0.0


class Slow(ScriptRunner):
    """Takes its time: so much for a prompt, so much for a token, in seconds."""

    def __init__(self, vocabulary: int, first: float, step: float) -> None:
        super().__init__([2], vocabulary)  # an end of text, which must not end the row
        self.first, self.each = first, step
        self.shapes: list[tuple[int, ...]] = []

    def step(self, arrays: Mapping[str, Array]) -> Array:
        self.shapes.append(arrays["input_ids"].shape)
        Clock.now += self.each if self.past else self.first
        return super().step(arrays)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(perf_counter=lambda: Clock.now)
    monkeypatch.setattr(bench_generation, "time", made)


def measured(contract: Any, tokenizer: Any, **changes: Any) -> tuple[Any, dict[str, Slow]]:
    size = tokenizer.get_vocab_size()
    systems = {
        "candidate": Slow(size, 0.002, 0.001),
        "onnxruntime-float": Slow(size, 0.012, 0.003),
    }
    given: dict[str, Any] = {
        "prompts": PROMPTS,
        "lengths": [6, 40],
        "batch": [1, 3],
        "new_tokens": 5,
        "iterations": 4,
        **changes,
    }
    return measure_generation(systems, contract, tokenizer, **given), systems


def test_every_cell_has_its_batch_its_prompt_and_its_new_tokens(
    contract: Any, tokenizer: Any
) -> None:
    made, systems = measured(contract, tokenizer)
    cells = [(c["batch"], c["prompt"]) for c in made["cells"]]
    assert cells == [(1, 6), (1, 40), (3, 6), (3, 40)]
    for system in systems.values():
        wanted = [s for rows, length in cells for s in 5 * ([(rows, length)] + 4 * [(rows, 1)])]
        assert system.shapes == wanted


def test_the_first_token_and_the_next_ones_are_told_apart(contract: Any, tokenizer: Any) -> None:
    made, _ = measured(contract, tokenizer)
    for cell in made["cells"]:
        figures, rows = cell["systems"]["candidate"], cell["batch"]
        assert figures["ttft"]["p50"] == pytest.approx(2)
        assert figures["inter_token"]["p99"] == pytest.approx(1)
        assert figures["tokens_per_second"] == pytest.approx(1000 * rows)
        assert figures["prefill_tokens_per_second"] == pytest.approx(500 * rows * cell["prompt"])
        assert cell["ratio"]["ttft"]["median"] == pytest.approx(2 / 12)
        assert cell["ratio"]["inter_token"]["median"] == pytest.approx(1 / 3)


def test_steps_are_counted_by_what_came_before_them(contract: Any, tokenizer: Any) -> None:
    wide = replace(contract, generation=replace(contract.generation, context=512))
    made, _ = measured(wide, tokenizer, lengths=[125], batch=[1])
    (cell,) = made["cells"]
    bins = cell["systems"]["candidate"]["by_context"]
    # 126, 127, 128 and 129 tokens before the second to the fifth
    assert [(b["up_to"], b["steps"]) for b in bins] == [(128, 12), (256, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths"),
        ({"prompts": []}, "prompts"),
        ({"new_tokens": 1}, "1 new tokens"),
        ({"lengths": [92]}, "92 tokens and 5 new ones.*together 2 to 96"),
    ],
)
def test_nothing_that_fits_is_an_error(
    changes: dict[str, Any], message: str, contract: Any, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=message):
        measured(contract, tokenizer, **changes)


def test_a_batch_that_would_be_split_is_refused(
    contract: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOGITS", 4 * 40 * contract.generation.vocabulary)
    with pytest.raises(InputError, match="3 prompts of 40 tokens do not run as one batch"):
        measured(contract, tokenizer)
