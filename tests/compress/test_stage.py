"""The stage as a whole: what it writes, and that the same comes out however it got there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from optimizer.compress import stage
from optimizer.foundation import state
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Activations, Weights
from tests.compress.checkpoints import W8A8, compress, contents, modules, section

FIRST = "encoder.layer.0.attention.self.query"


def test_every_linear_of_the_blocks_is_quantized_and_reported(static: Path) -> None:
    made = state.read(static)
    assert len(made.weights) == 12
    quantized = {m: r for m, r in modules(static).items() if r["scheme"] != "float"}
    assert {f"{m}.weight" for m in quantized} == set(made.weights)
    for row in quantized.values():
        assert 0 < row["weight_error"] < 0.05
        assert 0 < row["output_error"] < 0.2
        assert 0 <= row["saturation"] < 0.01
        assert row["range"][0] < 0 < row["range"][1]


def test_the_same_recipe_gives_the_same_bytes(loaded: Path, static: Path, tmp_path: Path) -> None:
    torch.manual_seed(12345)  # nothing is drawn from the global generator
    again = compress(loaded, tmp_path / "out", method="smoothquant", bias_correction=True, **W8A8)
    assert contents(again) == contents(static)


def test_only_the_results_are_left_behind(static: Path) -> None:
    results = {"state.json", "tensors.safetensors", "modules.json", "corrections.safetensors"}
    results |= {"calibration.json"}
    assert set(contents(static)) == results


@pytest.mark.parametrize(
    ("after", "left"),
    [
        ("state.write", [range(1), range(1, 2)]),  # the first block's bytes are there, unnamed
        ("stage._write_segment", [range(1, 2)]),
        ("stage._assemble", []),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bytes(
    after: str,
    left: list[range],
    loaded: Path,
    static: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"method": "smoothquant", "bias_correction": True, **W8A8}
    owner, name = {"state": state, "stage": stage}[after.split(".")[0]], after.split(".")[1]
    original, compress_segment = getattr(owner, name), stage.segments.compress

    def killed(*args: object) -> None:
        original(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, killed)
    with pytest.raises(KeyboardInterrupt):
        compress(loaded, tmp_path / "out", **options)
    monkeypatch.undo()
    walked: list[range] = []

    def counted(*args: object) -> object:
        walked.append(args[0].segment)  # type: ignore[arg-type]
        return compress_segment(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(stage.segments, "compress", counted)
    stage.run(section(loaded, **options), loaded, out=tmp_path / "out")
    assert contents(tmp_path / "out") == contents(static)
    assert walked == left


def test_killed_while_tidying_up_nothing_is_computed_again(
    loaded: Path, static: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(static, out)
    (out / stage.ASSEMBLED).mkdir()
    stage.run(section(loaded, **W8A8), tmp_path / "no source is read", out=out)
    assert contents(out) == contents(static)


def test_the_batch_size_changes_nothing_but_float_rounding(loaded: Path, tmp_path: Path) -> None:
    ranges = [
        state.read(compress(loaded, tmp_path / str(n), batch_size=n, **W8A8)).ranges for n in (1, 5)
    ]
    for site, one in ranges[0].items():
        assert (one.low, one.high) == pytest.approx(
            (ranges[1][site].low, ranges[1][site].high), rel=1e-3
        )


def test_without_calibration_data_weights_are_rounded_and_nothing_is_measured(
    loaded: Path, tmp_path: Path
) -> None:
    out = compress(loaded, tmp_path / "out", data=False)
    made = state.read(out)
    assert len(made.weights) == 12
    assert made.activations is None
    assert not made.ranges
    assert modules(out)[FIRST]["output_error"] is None


def test_weights_without_activations_do_not_depend_on_calibration(
    loaded: Path, tmp_path: Path
) -> None:
    weights = Weights(bits=4, granularity="group", group_size=32)
    a = compress(loaded, tmp_path / "a", data=False, weights=weights)
    walked = Activations(granularity="token")
    b = compress(loaded, tmp_path / "b", weights=weights, activations=walked)
    assert contents(a)["tensors.safetensors"] == contents(b)["tensors.safetensors"]


def test_texts_that_no_method_needs_are_not_read(
    loaded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = section(loaded)
    assert asked.calibrate is not None
    missing = asked.calibrate.data.model_copy(update={"files": (str(tmp_path / "no.jsonl"),)})
    elsewhere = asked.calibrate.model_copy(update={"data": missing})
    (tmp_path / "out").mkdir()
    stage.run(asked.model_copy(update={"calibrate": elsewhere}), loaded, out=tmp_path / "out")
    assert "calibrate: not read: no method here reads activations" in capsys.readouterr().err
    assert "calibration.json" not in contents(tmp_path / "out")


def test_weights_without_activations_do_not_depend_on_the_number_of_threads(
    loaded: Path, tmp_path: Path
) -> None:
    weights, before = Weights(bits=4, granularity="group", group_size=16), torch.get_num_threads()
    made = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            made.append(contents(compress(loaded, tmp_path / str(count), weights=weights)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert made[0] == made[1]


def test_query_key_and_value_share_one_range_and_one_factor(static: Path) -> None:
    made = state.read(static)
    sites = [f"encoder.layer.1.attention.self.{n}:input" for n in ("query", "key", "value")]
    assert len({made.ranges[s] for s in sites}) == 1
    assert all(torch.equal(made.factors[s], made.factors[sites[0]]) for s in sites)


def test_fold_only_leaves_no_factor(loaded: Path, tmp_path: Path) -> None:
    out = compress(loaded, tmp_path / "out", method="smoothquant", fold_only=True, **W8A8)
    made = state.read(out)
    assert not made.factors
    assert {n for n in made.replaced if n.startswith("encoder.layer.0.")} == {
        "encoder.layer.0.attention.self.value.weight",
        "encoder.layer.0.attention.self.value.bias",
        "encoder.layer.0.attention.output.dense.weight",
    }


def test_fold_only_of_some_modules_leaves_the_factors_of_the_others_as_they_were(
    loaded: Path, static: Path, tmp_path: Path
) -> None:
    """Of those that read one input, one that is named is enough."""
    names = ("encoder.layer.?.output.dense", "encoder.layer.0.*.key")
    options = {"method": "smoothquant", "bias_correction": True, **W8A8}
    out = compress(loaded, tmp_path / "out", fold_only=names, **options)
    first = "encoder.layer.0"
    gone = {f"{first}.attention.self.{n}:input" for n in ("query", "key", "value")}
    gone |= {f"encoder.layer.{i}.output.dense:input" for i in (0, 1)}
    before, after = state.read(static).factors, state.read(out).factors
    assert set(before) - set(after) == gone & set(before)
    assert len(gone & set(before)) > len(gone) // 2
    site = f"{first}.intermediate.dense:input"
    assert torch.equal(after[site], before[site])
    row = next(r for r in json.loads((out / "modules.json").read_text()) if r["module"] == FIRST)
    assert "fold_only" in json.dumps(row)


def test_a_pattern_of_fold_only_that_names_no_module_is_refused(
    loaded: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"quantize.fold_only.1.*did you mean"):
        compress(
            *(loaded, tmp_path / "out"),
            method="smoothquant",
            fold_only=("*", "*.outptu.dense"),
            **W8A8,
        )


def test_a_norm_that_feeds_a_residual_is_never_folded_into(static: Path) -> None:
    assert not [n for n in state.read(static).replaced if "LayerNorm" in n]


def test_symmetric_ranges_have_their_zero_in_the_middle(loaded: Path, tmp_path: Path) -> None:
    out = compress(loaded, tmp_path / "out", activations=Activations(symmetric=True))
    assert {r.zero_point for r in state.read(out).ranges.values()} == {128}


def test_per_token_activations_need_no_ranges(loaded: Path, tmp_path: Path) -> None:
    out = compress(loaded, tmp_path / "out", activations=Activations(granularity="token"))
    made = state.read(out)
    assert made.activations == "token"
    assert not made.ranges
    assert 0 < modules(out)[FIRST]["output_error"] < 0.1


def test_a_classifier_keeps_its_head_in_float_and_says_why(
    loaded_classifier: Path, tmp_path: Path
) -> None:
    out = compress(loaded_classifier, tmp_path / "out", **W8A8)
    notes = {n.module: n.why for n in state.read(out).notes}
    assert "outside the blocks" in notes["classifier"]
    assert "outside the blocks" in notes["bert.pooler.dense"]
    assert "bert.encoder.layer.0.output.dense.weight" in state.read(out).weights


def test_nan_in_a_weight_is_refused_by_name(loaded: Path, tmp_path: Path) -> None:
    from optimizer.foundation import safetensors_stream

    broken = tmp_path / "load"
    shutil.copytree(loaded, broken)
    shutil.copy(loaded.with_suffix(".jsonl"), broken.with_suffix(".jsonl"))
    tensors = dict(open_checkpoint(loaded).tensors)
    tensors[f"{FIRST}.weight"][0, 0] = float("nan")
    safetensors_stream.write(tensors.items(), broken / "checkpoint" / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{FIRST}.weight: holds NaN"):
        compress(broken, tmp_path / "a", data=False)
    with pytest.raises(CheckpointError, match="NaN"):
        compress(broken, tmp_path / "b", **W8A8)
