"""A target of another distribution: an entry point, and no line of ours changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from optimizer import pipeline, targets
from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.cli import main
from optimizer.foundation import state as states
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.source_digest import digest_sources
from optimizer.recipe import file as recipe_file
from optimizer.store import Store
from tests.conftest import write_tiny_recipe

MODULE = '''
"""Weights as numpy arrays, de-quantized; torch multiplies with what is read back."""
import json
from typing import Literal

import numpy as np
import torch

from optimizer.foundation import state as states
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.targets import TargetSection
from optimizer.targets import Accepts, Target
from optimizer.validate.ledger import trace


class Section(TargetSection):
    runtime: Literal["arrays"]
    half: bool = False

    @property
    def export(self):
        return None  # no graph is needed


def lower(section, source, state, graph, out):
    compressed = states.read(state)
    kind = np.float16 if section.half else np.float32
    arrays = {n: q.dequantize().numpy().astype(kind) for n, q in compressed.weights.items()}
    np.savez(out / "weights.npz", **arrays)
    (out / "lowering.json").write_text(json.dumps({"modules": sorted(arrays)}))


class Runner:
    def __init__(self, run, device):
        arrays = dict(np.load(run.model / "weights.npz"))
        weights = {name: torch.from_numpy(a).float() for name, a in arrays.items()}
        self.model = load_torch_model(run.checkpoint, run.task, overrides=weights)
        self.outputs = run.outputs

    def infer(self, arrays):
        return trace.run(self.model, arrays, self.outputs)

    def close(self):
        pass


TARGET = Target("arrays", Section, Accepts(), "toy_arrays:lower", files=("weights.npz",),
                open="toy_arrays:Runner", untimed="numpy is not timed")
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files, as pip would put them there. Returns the module's."""
    info = tmp_path / "site" / "toy_arrays-0.dist-info"
    info.mkdir(parents=True)
    files = {
        tmp_path / "site" / "toy_arrays.py": MODULE,
        info / "METADATA": "Metadata-Version: 2.1\nName: toy_arrays\nVersion: 0\n",
        info / "entry_points.txt": "[optimizer.targets]\narrays = toy_arrays:TARGET\n",
    }
    for file, text in files.items():
        file.write_text(text)
    assert len(files) <= 3
    assert sum(len(text.splitlines()) for text in files.values()) <= 60
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "toy_arrays", raising=False)  # another test's
    digest_sources.cache_clear()
    return tmp_path / "site" / "toy_arrays.py"


def recipe(folder: Path, model: Path, target: str) -> Path:
    """The tiny recipe with this target alone, its weights in eight bits and nothing else."""
    file = write_tiny_recipe(folder, model)
    head, tail = file.read_text().split("targets:\n", 1)
    lines = [line for line in head.splitlines(keepends=True) if "activations:" not in line]
    file.write_text(f"{''.join(lines)}targets:\n  - {target}\n{tail[tail.index('validate:') :]}")
    return file


def test_it_is_lowered_judged_as_far_as_it_can_be_and_packaged(
    installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    file = recipe(tmp_path / "recipe", tiny_bert, "{runtime: arrays}")
    outcome = pipeline.run(recipe_file.read(file), Store(tmp_path / "store"))
    (built,) = outcome.built
    weights = states.read(
        next(p for p in (tmp_path / "store" / "compress").iterdir() if p.is_dir())
    ).weights
    with np.load(built.model.path / "weights.npz") as arrays:
        assert set(arrays) == set(weights)
        assert all(np.array_equal(arrays[n], q.dequantize()) for n, q in weights.items())
    report = json.loads((built.report.path / "report.json").read_text())
    assert report["quality"]["candidate"]["value"] > 0.9
    assert report["not_measured"]["speed"] == "numpy is not timed"
    (ledger,) = (g for g in report["gates"] if g["name"] == "ledger")
    assert "not run here: lower" in ledger["message"]
    (lower,) = (e for e in report["ledger"] if e["hop"] == "lower")
    assert "no hop here judges models lowered for arrays" in lower["why"]
    assert outcome.bundle is not None
    manifest = json.loads((outcome.bundle.path / "bundle" / "manifest.json").read_text())
    assert manifest["engines"][0]["model"] == "model/arrays-cpu/weights.npz"
    assert manifest["runnable"] is False


def test_what_nothing_here_runs_is_not_said_to_be_as_good(
    installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    installed.write_text(MODULE.replace('open="toy_arrays:Runner"', 'open=""'))
    file = recipe(tmp_path / "recipe", tiny_bert, "{runtime: arrays}")
    outcome = pipeline.run(recipe_file.read(file), Store(tmp_path / "store", until="package"))
    (built,) = outcome.built
    report = json.loads((built.report.path / "report.json").read_text())
    assert report["quality"] is None
    assert "nothing here runs" in report["not_measured"]["quality"]
    gates = {g["name"]: g["verdict"] for g in report["gates"]}
    assert gates["quality.cosine"] == report["verdict"] == "inconclusive"
    assert outcome.bundle is None


NOT_INSTALLED = MODULE.replace("untimed=", 'judged_by=("no-such-package",), untimed=')


@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_what_would_judge_it_is_missed_before_any_work(
    command: str, installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    installed.write_text(NOT_INSTALLED)
    file = recipe(tmp_path / "recipe", tiny_bert, "{runtime: arrays}")
    store = tmp_path / "store"
    result = CliRunner().invoke(main, [command, str(file), "--store", str(store)])
    assert result.exit_code == 5
    assert "targets.0: no-such-package is not installed" in result.stderr
    assert "pip install no-such-package, or set on_missing: defer" in result.stderr
    assert not list(store.glob("*/*/made_from.json"))


def test_what_would_judge_it_is_not_missed_by_a_run_that_stops_earlier(
    installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    installed.write_text(NOT_INSTALLED)
    file = recipe(tmp_path / "recipe", tiny_bert, "{runtime: arrays}")
    outcome = pipeline.run(recipe_file.read(file), Store(tmp_path / "store", until="load"))
    assert outcome.built == ()


def test_deferred_it_is_lowered_and_the_report_says_that_it_is_not_judged(
    installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    installed.write_text(NOT_INSTALLED)
    file = recipe(tmp_path / "recipe", tiny_bert, "{runtime: arrays, on_missing: defer}")
    (built,) = pipeline.run(recipe_file.read(file), Store(tmp_path / "store")).built
    assert (built.model.path / "weights.npz").is_file()
    report = json.loads((built.report.path / "report.json").read_text())
    assert "no-such-package is not installed" in report["not_measured"]["quality"]
    assert report["ledger"][-1]["ok"] is None
    assert "no-such-package is not installed" in report["ledger"][-1]["why"]
    assert report["verdict"] == "inconclusive"


def test_what_takes_a_recipe_instead_is_named_with_ours(
    installed: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    file = recipe(tmp_path, tiny_bert, "{runtime: tensorrt-rtx}")
    file.write_text(file.read_text().replace("granularity: channel", "symmetric: false"))
    with pytest.raises(RecipeError, match=r"true, or target onnxruntime, .*, arrays\."):
        accepted.check(recipe_file.read(file), Context())


def test_its_section_is_checked_like_ours(installed: Path, tiny_bert: Path, tmp_path: Path) -> None:
    file = recipe(tmp_path, tiny_bert, "{runtime: arrays, hlaf: true}")
    with pytest.raises(RecipeError, match=r"targets\.0\.hlaf: unknown key.*half"):
        recipe_file.read(file)
    file.write_text(file.read_text().replace("arrays, hlaf", "arays, hlaf"))
    with pytest.raises(RecipeError, match=r'targets\.0: .*did you mean "arrays"'):
        recipe_file.read(file)


def test_its_code_is_part_of_the_key(installed: Path) -> None:
    before = targets.look_up("arrays").code("lower")
    assert set(before) == {"code of toy_arrays", "record of arrays", "version of arrays"}
    installed.write_text(MODULE.replace("numpy is not timed", "it is not timed"))
    digest_sources.cache_clear()
    assert targets.look_up("arrays").code("lower") != before


def test_without_its_distribution_it_is_not_known(tiny_bert: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"arrays.*accepted: onnxruntime, onnxruntime-web"):
        recipe_file.read(recipe(tmp_path, tiny_bert, "{runtime: arrays}"))
