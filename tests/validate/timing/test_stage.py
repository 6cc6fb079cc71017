"""Sizes are timed, chosen and made; the gain over the unreduced model is judged at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

from optimizer import pipeline
from optimizer.model.checkpoint.checkpoint import open_checkpoint, read_json
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Latencies
from optimizer.reduce.structure.layout import open_layout
from optimizer.reduce.structure.sizes import Sizes
from optimizer.store import Store
from optimizer.timing.stopping_rules import StoppingRule
from optimizer.validate.timing import stage
from optimizer.validate.timing.latency_gain import ModelFolders
from optimizer.validate.timing.sized_models import make_model, write_first_units
from tests.conftest import write_tiny_bert, write_tiny_recipe
from tests.reduce.smaller import loaded


def recipe(folder: Path, gain: float, iterations: int = 6) -> Path:
    model = write_tiny_bert(folder / "of" / "model", layers=2)
    file = write_tiny_recipe(folder / "recipe", model)
    goal = f"{{goal: {{latency_gain: {gain}}}, multiple_of: 64}}"
    text = file.read_text().replace("quantize:\n", f"reduce: {goal}\nquantize:\n", 1)
    text = text.replace("max_drop: 0.1", "max_drop: 0.9")
    file.write_text(text.replace("iterations: 5", f"iterations: {iterations}\n    max_seconds: 1"))
    return file


def section(folder: Path, gain: float, *overrides: str) -> Latencies:
    chosen = recipe_file.read(recipe(folder, gain), overrides).latencies
    assert chosen is not None
    return chosen


def test_a_killed_run_times_no_size_again(tmp_path: Path) -> None:
    reference, wanted, out = loaded("bert", tmp_path, 2), section(tmp_path, 1.5), tmp_path / "out"
    out.mkdir()
    neurons: list[int] = []

    def compared(
        unreduced: ModelFolders, candidate: ModelFolders, _until: StoppingRule
    ) -> Mapping[str, Any]:
        assert (unreduced.model / "model.onnx").is_file()
        config = read_json(candidate.source / "checkpoint" / "config.json")
        neurons.append(config["intermediate_size"])
        if len(neurons) == 2:
            raise KeyboardInterrupt
        return {"ratio": 0.65, "interval": [0.64, 0.66], "runs": 6, "p50": {}}

    with pytest.raises(KeyboardInterrupt):
        stage.measure(wanted, reference, out, compared)
    stage.measure(wanted, reference, out, compared)
    assert neurons == [64, 64, 64]  # of the table; to confirm; that again
    files = {str(f.relative_to(out)) for f in out.rglob("*") if f.is_file()}
    assert files == {"table.json", "unreduced/model.onnx", "unreduced/lowering.json"}
    table = read_json(out / "table.json")
    assert table["unreduced"] == {"blocks": 2, "ffn": 128, "heads": 0}
    assert table["candidates"] == [{"blocks": 2, "ffn": 64, "heads": 0}]


def quantized(folder: Path) -> bool:
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return onnx.TensorProto.INT8 in {tensor.data_type for tensor in graph.initializer}


def test_a_gain_over_float_is_timed_beside_the_reference_in_float(tmp_path: Path) -> None:
    reference, out = loaded("bert", tmp_path, 2), tmp_path / "out"
    wanted = section(tmp_path, 1.5, "reduce.gain_over=float")
    out.mkdir()

    def compared(
        unreduced: ModelFolders, candidate: ModelFolders, _until: StoppingRule
    ) -> Mapping[str, Any]:
        assert not quantized(unreduced.model)
        assert quantized(candidate.model)
        config = read_json(candidate.source / "checkpoint" / "config.json")
        ratio = 0.4 + 0.4 * config["intermediate_size"] / 128
        return {"ratio": ratio, "interval": [ratio - 0.01, ratio + 0.01], "runs": 6, "p50": {}}

    stage.measure(wanted, reference, out, compared)
    table = read_json(out / "table.json")
    assert table["over"] == "float"
    assert (table["whole"]["sizes"]["ffn"], table["whole"]["ratio"]) == (128, 0.8)
    assert [e["sizes"]["ffn"] for e in table["entries"]] == [64]
    assert not quantized(out / "unreduced")


def test_the_first_units_of_the_first_blocks_are_what_is_timed(tmp_path: Path) -> None:
    reference = loaded("bert", tmp_path, 2)
    out = tmp_path / "out"
    out.mkdir()
    layout = open_layout(section(tmp_path, 1.5).reduction, reference)
    write_first_units(layout, Sizes(1, 32, 0), out)
    whole, part = (open_checkpoint(folder).tensors for folder in (reference, out))
    name = "encoder.layer.0.intermediate.dense.weight"
    assert torch.equal(part[name], whole[name][:32])
    assert not any("layer.1" in n for n in part)


def test_a_rule_on_a_block_that_is_not_there_is_left_out(tmp_path: Path) -> None:
    reference, out = loaded("bert", tmp_path, 2), tmp_path / "out"
    wanted = section(tmp_path, 1.5, "quantize.keep_float=[encoder.layer.1.*, '*.query']")
    layout = open_layout(wanted.reduction, reference)
    model = make_model(wanted, layout, Sizes(1, 128, 0), out)
    lowered = read_json(model.model / "lowering.json")
    assert "encoder.layer.0.attention.self.query" in lowered["float"]
    assert "encoder.layer.0.attention.self.key" in lowered["modules"]


def test_a_run_ends_with_the_gain_that_was_reached(tmp_path: Path) -> None:
    """The tolerance is so wide that any time is within it; too few runs decide nothing."""
    wanted = recipe_file.read(recipe(tmp_path, 1.0001), ["reduce.gain_tolerance=0.99"])
    outcome = pipeline.run(wanted, Store(tmp_path / "store"))
    (built,) = outcome.built
    report = json.loads((built.report.path / "report.json").read_text())
    (gate,) = (g for g in report["gates"] if g["name"] == "speed.latency_gain")
    assert gate["verdict"] in ("pass", "fail", "inconclusive")
    assert (
        "times as fast as the unreduced model in the same quantization at batch 1"
        in gate["message"]
    )
    table, gain = report["latencies"], report["speed"]["gain"]
    assert gain["goal"] == table["goal"] == 1.0001
    assert gate["limit"] == gain["least"] == pytest.approx(0.01 * 1.0001)
    assert {"unreduced", "candidate"} == {*gain["p50"]}
    kept = [report["reduced"]["sizes"][kind][1] for kind in ("blocks", "ffn", "heads")]
    assert kept == [table["candidates"][0][kind] for kind in ("blocks", "ffn", "heads")]
    assert [(e["sizes"]["blocks"], e["sizes"]["ffn"]) for e in table["entries"]] == [(2, 64)]
    assert table["candidates"] == [tried["sizes"] for tried in table["confirmed"]]
