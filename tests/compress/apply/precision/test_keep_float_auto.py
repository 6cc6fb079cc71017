"""Modules with the largest errors stay float until the limit is met, with a note."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress.data import calibration
from optimizer.compress.methods.precision.keep_float_auto import RelativeError
from optimizer.compress.simulate import simulate_state
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import RecipeError
from optimizer.load.stage import STAGE as LOAD
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.compression.quantize import KeepFloatAuto
from optimizer.recipe.schema import Compression
from tests.compress import checkpoints, decoders
from tests.compress.checkpoints import compress, modules
from tests.vision import recipe

STATIC: dict[str, Any] = {"method": "rtn", "activations": {"range": "minmax"}}


def moved(source: Path, section: Compression, folder: Path) -> float:
    """Relative change of the output by the state, on the calibration inputs including padding."""
    model, error = load_torch_model(open_checkpoint(source), section.task), RelativeError()
    twin = simulate_state(model, compressed_state.read(folder))
    with torch.no_grad():
        for batch in calibration.make_batches(section, source):
            error.update(model(**batch)[0], twin(**batch)[0])
    return error.value


def of_texts(loaded: Path, folder: Path) -> tuple[Path, Compression]:
    return loaded, checkpoints.section(loaded, **STATIC)


def of_images(_loaded: Path, folder: Path) -> tuple[Path, Compression]:
    made = recipe(folder, "efficientnet_lite", STATIC)
    (folder / "load").mkdir()
    LOAD.run(made.model, out=folder / "load")
    return folder / "load", made.compression


def run(source: Path, section: Compression, out: Path, **auto: Any) -> float:
    """The error of what comes out."""
    chosen = {"keep_float_auto": KeepFloatAuto(**auto)} if auto else {}
    quantize = section.quantize.model_copy(update=chosen)
    out.mkdir()
    COMPRESS.run(section.model_copy(update={"quantize": quantize}), source, out=out)
    return moved(source, section, out)


@pytest.mark.parametrize("make", [of_texts, of_images])
def test_modules_stay_float_until_the_error_is_met_and_the_report_says_why(
    make: Any, loaded: Path, tmp_path: Path
) -> None:
    source, section = make(loaded, tmp_path)
    whole = run(source, section, tmp_path / "whole")
    error = run(source, section, tmp_path / "part", max_error=whole / 2, max_share=0.99)
    every, state = (compressed_state.read(tmp_path / n) for n in ("whole", "part"))
    kept = set(every.modules) - set(state.modules)
    why = {n.module: n.why for n in state.notes}
    rows = modules(tmp_path / "part")
    assert kept
    assert error < 0.75 * whole  # measured with other ranges: those of the float model's inputs
    assert all(why[name].startswith("keep_float_auto: ") for name in kept)
    assert all(rows[name]["scheme"] == "float" and rows[name]["note"] == why[name] for name in kept)


def test_a_decoder_is_judged_by_what_its_head_reads(llama: Path, tmp_path: Path) -> None:
    whole = decoders.compress(llama, tmp_path / "whole")
    before = decoders.error(llama, whole)
    auto = {"max_error": before / 2, "max_share": 0.99}
    part = decoders.compress(llama, tmp_path / "part", keep_float_auto=auto)
    assert set(part.modules) < set(whole.modules)
    assert decoders.error(llama, part) < 0.75 * before


def test_nothing_stays_float_where_the_error_is_met(loaded: Path, tmp_path: Path) -> None:
    auto = {"keep_float_auto": KeepFloatAuto(max_error=1.0)}
    plain = compress(loaded, tmp_path / "a", **STATIC)
    same = compress(loaded, tmp_path / "b", **STATIC, **auto)
    assert checkpoints.contents(plain) == checkpoints.contents(same)


def test_more_than_the_share_asked_for_is_refused_with_what_it_would_take(
    loaded: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"12 of 12 modules with 100\.0% of the weights") as e:
        compress(loaded, tmp_path / "out", **STATIC, keep_float_auto=KeepFloatAuto(max_error=1e-9))
    assert e.value.where == "quantize.keep_float_auto.max_error"
