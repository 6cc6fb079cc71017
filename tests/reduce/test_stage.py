"""The smaller checkpoint: what is in it, and that it computes what was kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from optimizer.foundation.errors import RecipeError
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.reduce.smaller import DECODERS, ENCODERS, copied, loaded, reduced

KINDS = (*ENCODERS, *DECODERS)
INPUTS = torch.randint(5, 90, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=KINDS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(request.param, tmp_path_factory.mktemp(request.param))


def output(folder: Path) -> torch.Tensor:
    task = json.loads((folder / "contract.json").read_text())["task"]
    model: Any = load_torch_model(open_checkpoint(folder), task)
    with torch.no_grad():
        return model(input_ids=INPUTS)[0]


def test_transformers_loads_the_smaller_checkpoint_with_nothing_missing(
    reference: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel

    folder = reduced(reference, tmp_path / "out", {"keep": 0.7})
    _, info = AutoModel.from_pretrained(folder / "checkpoint", output_loading_info=True)
    assert {k: v for k, v in info.items() if v and k != "unexpected_keys"} in (
        {},
        {"missing_keys": info["missing_keys"]},
    )
    assert all("pooler" in name for name in info["missing_keys"])
    document = json.loads((folder / "reduced.json").read_text())
    before, after = document["weights"]["blocks"]
    assert after <= 0.7 * before
    assert after < before


def test_keeping_all_keeps_every_bit(reference: Path, tmp_path: Path) -> None:
    folder = reduced(reference, tmp_path / "out", {"keep": 1.0})
    for name in ("checkpoint/model.safetensors", "contract.json", "source.json"):
        assert (folder / name).read_bytes() == (reference / name).read_bytes()
    assert torch.equal(output(folder), output(reference))


def test_a_unit_of_zeros_is_left_out_without_a_change(reference: Path, tmp_path: Path) -> None:
    """Least important by every measure, and nothing reads it."""
    folder = reduced(reference, tmp_path / "once", {"keep": 0.7})
    document = json.loads((folder / "reduced.json").read_text())
    zeroed = with_zeros(reference, document, tmp_path / "zeroed")
    again = reduced(zeroed, tmp_path / "twice", {"keep": 0.7})
    assert json.loads((again / "reduced.json").read_text())["layers"] == document["layers"]
    torch.testing.assert_close(output(again), output(zeroed), rtol=1e-4, atol=1e-5)


def with_zeros(reference: Path, document: dict[str, Any], folder: Path) -> Path:
    """The reference with zeros in the columns that read what the document leaves out."""
    from safetensors.torch import save_file

    from optimizer.reduce.structure.layout import open_layout
    from tests.reduce.smaller import section

    copied(reference, folder)
    layout = open_layout(section(reference, {"keep": 0.7}), folder)
    file = folder / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    for layer in document["layers"]:
        for part in layout.parts(layer["of"]):
            if (kept := layer.get(part.kind)) is None:
                continue
            dropped = torch.tensor(sorted({*range(part.count)} - {*kept}))
            names = {f"{r.linear}.{p}": r.of(dropped, part.count) for r in part.rows
                     for p in ("weight", "bias")}  # fmt: skip
            for name, rows in names.items():
                if name in tensors:
                    layout.checkpoint.tensors.as_stored(name, tensors[name])[rows] = 0
            name = f"{part.down}.weight"
            layout.checkpoint.tensors.as_stored(name, tensors[name])[:, part.columns(dropped)] = 0
    save_file(tensors, file)
    return folder


def test_fewer_heads_are_refused_where_the_config_cannot_carry_them(tmp_path: Path) -> None:
    reference = loaded("bert", tmp_path)
    with pytest.raises(RecipeError, match="cannot describe fewer heads"):
        reduced(reference, tmp_path / "out", {"keep": 0.9}, methods=["heads"])


def test_a_goal_out_of_reach_says_what_is_the_least(tmp_path: Path) -> None:
    reference = loaded("bert", tmp_path)
    with pytest.raises(RecipeError, match="the smallest model that these methods make"):
        reduced(reference, tmp_path / "out", {"keep": 0.01})


def test_a_total_of_parameters_is_met_and_counted(tmp_path: Path) -> None:
    reference = loaded("llama", tmp_path)
    before = json.loads((reference / "source.json").read_text())["parameters"]
    folder = reduced(reference, tmp_path / "out", {"parameters": 0.9 * before})
    after = json.loads((folder / "source.json").read_text())["parameters"]
    stored = sum(t.numel() for t in load_file(folder / "checkpoint/model.safetensors").values())
    assert 0.8 * before < after == stored <= 0.9 * before


def test_no_config_of_an_architecture_here_has_a_width_for_each_block() -> None:
    """Else `reduce` could thin each block by itself: transformers' own annotations say so (of
    Gemma 3n, which is none of these, int | list[int])."""
    import inspect

    from transformers import CONFIG_MAPPING

    known = [f for f in FAMILIES.values() if f.feed_forward and f.model_type in CONFIG_MAPPING]
    assert len(known) > 10
    for family in known:
        assert family.feed_forward is not None
        fields: dict[str, Any] = {}
        for base in reversed(CONFIG_MAPPING[family.model_type].__mro__):
            fields |= inspect.get_annotations(base)
        names = {
            family.feed_forward.width,
            *([family.attention.groups] if family.attention else []),
        }
        for name in names:
            assert "list" not in str(fields[name]), f"{family.model_type}.{name}"
