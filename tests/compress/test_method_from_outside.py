"""A rounding method of another distribution: an entry point, and no line of ours changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.foundation import state as states
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import absmax_scale
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe import file as recipe_file
from optimizer.recipe.compression.methods import Method
from optimizer.recipe.schema import Recipe
from optimizer.validate.ledger import hops
from tests.validate.runs import make, recipe

MODULE = '''
"""Round towards zero, on scales that are finer by a factor."""
from optimizer.foundation.qtensor import QTensor, absmax_scale, to_scale_grid
from optimizer.foundation.sections.section import Section
from optimizer.recipe.compression.methods import Method


class Options(Section):
    finer: float = 1.0


METHOD = Method("NAME", "rounding", "NAME:round_weight", options=Options, judged_by="JUDGED_BY")


def round_weight(weight, quantize):
    scale, zero_point = absmax_scale(weight.values, weight.scheme)
    scale = to_scale_grid(scale / quantize.NAME.finer)
    integers = (weight.values / scale).trunc().clamp(-127, 127)
    return QTensor(integers.char(), scale, zero_point, weight.scheme), "towards zero"
'''


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, judged_by: str = "") -> None:
    """Three files, as pip would put them there."""
    info = folder / f"{name}-0.dist-info"
    info.mkdir(parents=True)
    files = {
        folder / f"{name}.py": MODULE.replace("NAME", name).replace("JUDGED_BY", judged_by),
        info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n",
        info / "entry_points.txt": f"[optimizer.methods]\n{name} = {name}:METHOD\n",
    }
    for file, text in files.items():
        file.write_text(text)
    assert len(files) <= 3
    assert sum(len(text.splitlines()) for text in files.values()) <= 60
    monkeypatch.syspath_prepend(str(folder))


def asking(tiny_bert: Path, data: Path, **quantize: Any) -> Recipe:
    return recipe(str(tiny_bert), data, quantize, "sentence-embedding")


def test_its_state_holds_what_it_says_and_the_ledger_says_what_it_cannot_judge(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "towards_zero")
    asked = asking(tiny_bert, tmp_path, method="towards_zero", towards_zero={"finer": 1.25})
    run = make(tmp_path / "run", asked)
    state = states.read(run.folder("state"))
    assert len(state.weights) == 12
    for name, q in state.weights.items():
        weight = open_checkpoint(run.folder("source")).tensors[name]
        plain, _ = absmax_scale(weight, q.scheme)
        assert torch.allclose(q.scale, plain / 1.25, rtol=2**-8)
        assert torch.equal(q.integers.float(), (weight / q.scale).trunc().clamp(-127, 127))
    entry = hops.compress(run.materials())
    assert entry.ok
    assert "not judged: the integers of 12 modules: method towards_zero" in entry.unproven


def test_a_law_that_it_states_and_breaks_is_refused(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "not_nearest", judged_by="nearest")
    run = make(tmp_path / "run", asking(tiny_bert, tmp_path, method="not_nearest"))
    entry = hops.compress(run.materials())
    assert entry.ok is False
    assert "steps away, 0.5" in entry.problems[0]
    assert "or no limits" in entry.unproven


def test_its_code_is_part_of_the_key_and_that_of_others_is_not(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer.foundation.source_digest import digest_sources

    install(tmp_path / "site", monkeypatch, "changing")
    mine = asking(tiny_bert, tmp_path, method="changing").compression
    others = asking(tiny_bert, tmp_path, method="rtn").compression
    assert COMPRESS.files is not None
    before = COMPRESS.files(mine), COMPRESS.files(others)
    with (tmp_path / "site" / "changing.py").open("a") as f:
        f.write("# changed\n")
    digest_sources.cache_clear()
    assert COMPRESS.files(mine) != before[0]
    assert COMPRESS.files(others) == before[1]


RECIPE = """\
name: x
model: {source: somewhere, task: sentence-embedding}
quantize:
  METHOD
targets: [{runtime: onnxruntime}]
validate: {data: {source: text, files: [b.txt]}, metric: cosine}
"""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("method: stray", r"4: quantize\.method: \"stray\".*'rtn'.*'optoins'"),
        ("method: optoins\n  optoins: {finr: 2.0}", r"5: quantize\.optoins\.finr: unknown.*finer"),
        ("method: optoins\n  optoins: {finer: x}", r"5: quantize\.optoins\.finer: \"x\""),
        ("method: rtn\n  optoins: {finer: 2.0}", r"5: quantize\.optoins: unknown key"),
    ],
)
def test_what_is_wrong_with_it_is_refused_where_it_stands(
    lines: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "optoins")
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.replace("METHOD", lines))
    with pytest.raises(RecipeError, match=message):
        recipe_file.read(file)


def test_one_that_needs_calibration_data_is_named_with_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "calibrating")
    module = tmp_path / "site" / "calibrating.py"
    module.write_text(module.read_text().replace("judged_by=", "calibrated=True, judged_by="))
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.replace("METHOD", "method: calibrating"))
    with pytest.raises(RecipeError, match=r"methods .*gptq.*, calibrating need it"):
        recipe_file.read(file)


def test_its_options_are_part_of_the_section_that_keys_the_step(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "keyed")
    asked = asking(tiny_bert, tmp_path, method="keyed", keyed={"finer": 1.5})
    document = asked.compression.model_dump(mode="json")
    assert document["quantize"]["keyed"] == {"finer": 1.5}


def test_one_that_needs_activations_must_say_so() -> None:
    with pytest.raises(ValueError, match="calibrated=True"):
        Method("smooth", "smoothing", "smooth:smooth")
