"""Scale tuning end to end: its training and held-out windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress import stage
from optimizer.compress.apply.weights import scale_tuning
from optimizer.foundation import state as states
from optimizer.foundation.errors import DataError, RecipeError
from tests.compress.decoders import LENGTH, compress, section

HELD_OUT = 3  # windows that only judge what scale_tuning does


@pytest.mark.parametrize(("methods", "same"), [(["gptq", "scale_tuning"], True), (["gptq"], False)])
def test_only_scale_tuning_keeps_its_last_windows_from_what_chooses_the_codes(
    llama: Path, tmp_path: Path, methods: list[str], same: bool
) -> None:
    made = []
    for name, last in (("one", 5), ("two", 6)):
        ids = torch.stack([torch.arange(LENGTH) * k % 90 + 5 for k in [*range(7, 18), *[last] * 3]])
        batches = [{"input_ids": p, "attention_mask": torch.ones_like(p)} for p in ids.split(5)]
        out = tmp_path / name
        out.mkdir()
        stage.compress(section(llama, methods=methods), llama, lambda given=batches: given, out)
        made.append(states.read(out).weights)
    assert all(torch.equal(q.integers, made[1][n].integers) for n, q in made[0].items()) is same


@pytest.mark.parametrize(("everywhere", "only", "same"), [(4, 0, False), (0, 4, True)])
def test_own_text_for_scale_tuning_alone_leaves_the_codes_as_they_are(
    llama: Path,
    tmp_path: Path,
    everywhere: int,
    only: int,
    same: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, tuned_on = [], []
    tune = scale_tuning.tune

    def listening(source: Any, state: Any, windows: Any, section: Any) -> Any:
        tuned_on.append(sum(len(batch["input_ids"]) for batch in windows.train))
        return tune(source, state, windows, section)

    monkeypatch.setattr(scale_tuning, "tune", listening)
    for name, windows, more in (("without", 0, 0), ("with", everywhere, only)):
        asked = section(
            llama, methods=["gptq", "scale_tuning"], scale_tuning={"epochs": 1, "generated": more}
        )
        assert asked.calibrate is not None
        calibrate = asked.calibrate.model_copy(update={"samples": 8, "generated": windows})
        out = tmp_path / name
        out.mkdir()
        stage.run(asked.model_copy(update={"calibrate": calibrate}), llama, out)
        made.append(states.read(out).weights)
    pairs = [(q, made[1][n]) for n, q in made[0].items()]
    assert all(torch.equal(a.integers, b.integers) for a, b in pairs) is same
    assert tuned_on == [8 - HELD_OUT, 8 - HELD_OUT + 4]


def test_text_behind_what_is_calibrated_on_reaches_what_tunes_and_nothing_else(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def listening(source: Any, state: Any, windows: Any, section: Any) -> Any:
        train = torch.cat([batch["input_ids"] for batch in windows.train])
        seen.append(
            (dict(state.weights), train, torch.cat([b["input_ids"] for b in windows.held_out]))
        )
        return tune(source, state, windows, section)

    tune = scale_tuning.tune
    monkeypatch.setattr(scale_tuning, "tune", listening)
    for name, more in (("without", 0), ("with", 4)):
        asked = section(
            llama, methods=["gptq", "scale_tuning"], scale_tuning={"epochs": 1, "samples": more}
        )
        assert asked.calibrate is not None
        calibrate = asked.calibrate.model_copy(update={"samples": 8})
        (tmp_path / name).mkdir()
        stage.run(asked.model_copy(update={"calibrate": calibrate}), llama, tmp_path / name)
    (codes, train, held_out), (codes_too, longer, held_out_too) = seen
    assert all(torch.equal(q.integers, codes_too[n].integers) for n, q in codes.items())
    assert torch.equal(held_out, held_out_too)
    assert torch.equal(longer[: len(train)], train)
    added = {tuple(row.tolist()) for row in longer[len(train) :]}
    assert len(added) == 4
    assert not added & {tuple(row.tolist()) for row in torch.cat([train, held_out])}


def test_more_text_for_tuning_than_there_is_is_refused_before_anything_is_compressed(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"fills \d+ of 40 \+ 4000 windows") as refused:
        compress(
            llama,
            tmp_path / "out",
            methods=["gptq", "scale_tuning"],
            scale_tuning={"samples": 4000},
        )
    assert refused.value.where == "quantize.scale_tuning.samples"
    assert not any((tmp_path / "out" / "progress").glob("0*"))


def test_text_too_short_for_what_is_held_out_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="40 of 40 windows of text are to be held out"):
        compress(
            llama, tmp_path / "out", methods=["gptq", "scale_tuning"], scale_tuning={"held_out": 40}
        )
