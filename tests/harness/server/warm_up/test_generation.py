"""Warm-up measures the sharing of decode steps before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import BundleError, MachineError
from optimizer.harness.generate.loop import PREFILL
from optimizer.harness.process import memory
from optimizer.harness.runtimes.ort.slots import OrtSlots
from optimizer.harness.server.text_model import Room, TextModel
from optimizer.harness.server.warm_up import generation

ROUNDING = 1e-5  # far below what decides a token, far above zero


@contextmanager
def opened(bundle: Path, slots: int = 5) -> Iterator[TextModel]:
    model = TextModel(Bundle(bundle), Room(slots, 0, 64))
    try:
        yield model
    finally:
        model.close()


def rounded(monkeypatch: pytest.MonkeyPatch, by_place: bool) -> None:
    """Steps whose rows are computed two at a time, in another order than one: as some kernels do.
    by_place: and each row's in an order of its own."""
    run = OrtSlots._run

    def pairs(self: OrtSlots, adapter: str, row: int, ids: Any, mask: Any, positions: Any) -> Any:
        logits = run(self, adapter, row, ids, mask, positions)
        if ids.shape[1] == 1:
            together = len(ids) // 2 * 2
            steps = np.arange(1, together + 1) if by_place else np.ones(together)
            logits[:together] += (ROUNDING * steps).astype(np.float32)[:, None, None]
        return logits

    monkeypatch.setattr(OrtSlots, "_run", pairs)


def test_texts_share_steps_where_that_changes_no_bit(decoder_bundle: Path) -> None:
    with opened(decoder_bundle) as model:
        measured = generation.measure_model(model, "exact")
        assert (measured.sharing, measured.difference, measured.steady) == ("equal", 0.0, True)
        assert measured.compared >= 5 * 5
        assert model.slots.multiple == 1


def test_nothing_is_shared_where_that_is_not_wanted_or_there_is_one_slot(
    decoder_bundle: Path,
) -> None:
    for slots, batching in ((5, "alone"), (1, "exact"), (1, "padded")):
        with opened(decoder_bundle, slots) as model:
            assert generation.measure_model(model, batching).sharing == "alone"


def test_one_bit_that_differs_and_each_text_is_run_by_itself(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded(monkeypatch, by_place=False)
    with opened(decoder_bundle) as model:
        assert generation.measure_model(model, "exact").sharing == "alone"


def test_where_a_difference_is_accepted_steps_of_pairs_are_steady(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded(monkeypatch, by_place=False)
    with opened(decoder_bundle, 4) as model:
        measured = generation.measure_model(model, "padded")
        assert (measured.sharing, measured.steady, model.slots.multiple) == ("padded", True, 2)
        assert ROUNDING / 2 < measured.difference < 2 * ROUNDING


def test_where_rows_round_by_their_place_that_is_said(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded(monkeypatch, by_place=True)
    with opened(decoder_bundle) as model:
        measured = generation.measure_model(model, "padded")
        assert (measured.sharing, measured.steady, model.slots.multiple) == ("padded", False, 1)


def test_rows_of_a_step_in_other_memory_than_the_slots_are_refused(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(self: OrtSlots, past: str, first: int, last: int) -> Any:
        return self._runner.value(self._cache[past][first:last].copy())

    monkeypatch.setattr(OrtSlots, "_part", copied)
    with (
        opened(decoder_bundle, 4) as model,
        pytest.raises(BundleError, match="scores that are not its own"),
    ):
        generation.measure_model(model, "padded")


def test_pieces_that_change_scores_are_those_of_predict(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OrtSlots._run

    def by_length(
        self: OrtSlots, adapter: str, row: int, ids: Any, mask: Any, positions: Any
    ) -> Any:
        logits = run(self, adapter, row, ids, mask, positions)
        return logits + np.float32(ROUNDING) * (ids.shape[1] < mask.shape[1]) * (ids.shape[1] > 1)

    monkeypatch.setattr(OrtSlots, "_run", by_length)
    with opened(decoder_bundle) as model:
        assert generation.measure_model(model, "exact").piece == PREFILL


def test_scores_that_are_nan_are_refused(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "run_alone", lambda *_: [np.full(3, np.nan)])
    with opened(decoder_bundle) as model, pytest.raises(BundleError, match="NaN"):
        generation.measure_model(model, "exact")


def test_slots_that_do_not_fit_are_refused_with_what_does(decoder_bundle: Path) -> None:
    with Bundle(decoder_bundle) as bundle:
        assert TextModel(bundle, Room(2, 0, 1)).cache_bytes == 2 * 96 * 2 * 2 * 2 * 16 * 4
        with pytest.raises(MachineError, match="--context 48 at most"):
            TextModel(bundle, Room(4, 0, 1), 2 * 96 * 2 * 2 * 2 * 16 * 4)


def test_free_memory_is_the_least_of_the_machines_and_the_containers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert memory.read_free(meminfo, tmp_path) is None
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    assert memory.read_free(meminfo, tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("40960\n")
    (tmp_path / "memory.current").write_text("10000\n")
    assert memory.read_free(meminfo, tmp_path) == 30960
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.read_free(meminfo, tmp_path) == 50 << 10
