"""Load a torch module of the recipe's folder: the graph answers as the module does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.harness import contract as contracts
from optimizer.load.torch_module import code, module, stage
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Model, OnnxRuntimeTarget
from optimizer.validate.ledger import ledger

LAYERS = """
from torch import nn

class Rows(nn.Linear):
    pass
"""
NET = """
import torch
from torch import nn
from .layers import Rows

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(16, 3)
        self.wide = Rows(8, 16, bias=False)

    def forward(self, x, gain):
        x = torch.relu(self.wide(self.norm(x)))
        return {"scores": self.head(x.amax(1)) * gain, "size": x.mean((1, 2))}

def build():
    return Net()

def example():
    return torch.rand(1, 5, 8), torch.rand(1, 3)
"""


def section(folder: Path, net: str = NET, **more: object) -> Model:
    (folder / "pkg").mkdir(exist_ok=True)
    (folder / "pkg" / "net.py").write_text(net)
    (folder / "pkg" / "layers.py").write_text(LAYERS)
    torch.manual_seed(0)
    save_file(
        {
            "norm.weight": torch.rand(5),
            "norm.bias": torch.randn(5),
            "norm.running_mean": torch.randn(5),
            "norm.running_var": torch.rand(5) + 0.5,
            "norm.num_batches_tracked": torch.tensor(1),
            "wide.weight": torch.randn(16, 8),
            "head.weight": torch.randn(3, 16),
            "head.bias": torch.randn(3),
        },
        folder / "model.safetensors",
    )
    keys = {"module": "pkg.net:build", "weights": "model.safetensors", "example": "pkg.net:example"}
    return Model.model_validate(
        {**keys, "task": "tensors", "trust_code": True, "base": str(folder), **more}
    )


def materials(loaded: Path) -> Any:
    """As far as the first hop reads them."""
    section = SimpleNamespace(
        target=OnnxRuntimeTarget(runtime="onnxruntime"), reduce=None, recovery=None, training=None
    )
    return SimpleNamespace(
        source=loaded, section=section, contract=contracts.read(loaded / "contract.json")
    )


def load(section: Model, out: Path) -> Path:
    out.mkdir()
    stage.run(section, out)
    return out


def test_the_graph_has_the_names_and_the_answers_of_the_module(tmp_path: Path) -> None:
    of_module, before = section(tmp_path), (list(sys.path), list(sys.meta_path), set(sys.modules))
    loaded = load(of_module, tmp_path / "out")
    assert sys.path == before[0]
    assert sys.meta_path == before[1]
    assert not {"pkg", "pkg.net", "pkg.layers"} & set(sys.modules)
    assert not list(tmp_path.rglob("__pycache__"))
    config = json.loads((loaded / "checkpoint" / "config.json").read_text())
    assert config["modules"] == ["wide", "head"]
    source = json.loads((loaded / "source.json").read_text())
    assert set(source["files"]) == {"pkg/net.py", "pkg/layers.py", "model.safetensors"}
    x, gain = torch.randn(3, 5, 8), torch.randn(3, 3)
    ours = load_torch_model(open_checkpoint(loaded), "tensors")(x=x, gain=gain)
    with code.import_references(of_module) as functions:
        theirs = module.build(of_module, functions).module(x, gain)
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected)
    hop = ledger.list_hops(materials(loaded))[0](materials(loaded))
    assert (hop.hop, hop.start, hop.ok) == ("origin", "pkg.net:build", True)
    assert hop.reached is not None
    assert 0 < hop.reached < (hop.tolerance or 0) < 1e-3
    assert set((hop.spread or {})["outputs"]) == {"scores", "size"}
    assert "8 drawn rows and those of the example" in hop.unproven


def test_code_that_answers_otherwise_when_it_is_exported_is_refused(tmp_path: Path) -> None:
    net = NET.replace("* gain", "* gain * (1.001 if torch.compiler.is_exporting() else 1)")
    with pytest.raises(CheckpointError, match=r"'scores'.* from the answer of pkg\.net:build"):
        load(section(tmp_path, net), tmp_path / "out")


def test_without_trust_nothing_is_imported(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="read it, then set trust_code: true"):
        section(tmp_path, "1 / 0", trust_code=False)
    untrusted = section(tmp_path, "1 / 0").model_copy(update={"trust_code": False})
    with pytest.raises(RecipeError, match="trust_code"):
        load(untrusted, tmp_path / "out")


def test_a_printed_section_of_a_module_is_read_again(tmp_path: Path) -> None:
    of_module = section(tmp_path)
    again = json.loads(of_module.model_dump_json()) | {"base": of_module.base}
    assert Model.model_validate_json(json.dumps(again)) == of_module


def test_the_key_has_the_digest_of_every_file_that_is_imported(tmp_path: Path) -> None:
    of_module = section(tmp_path)
    before = stage.digests(of_module)
    assert before["package torch"] == torch.__version__
    (tmp_path / "pkg" / "layers.py").write_text(LAYERS + "# changed\n")
    after = stage.digests(of_module)
    assert {name for name in after if after[name] != before[name]} == {"pkg/layers.py"}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return Net()", "raise ValueError('no disk')", r"no disk, at pkg/net\.py:17"),
        ("return Net()", "import sys; sys.exit(0)", "tried to end the program"),
        ("return Net()", "__import__('pkg.other')", "No module named|not named by an import"),
        ("return Net()", "return Net().half()", "is float16 in the module"),
        ("nn.Linear(16, 3)", "nn.Linear(16, 4)", "head.bias has shape"),
        ("Rows(8, 16, bias=False)", "Rows(8, 16)", r"lacks 1 tensors: wide\.bias"),
        ("torch.rand(1, 3)", "torch.rand(2, 3)", "x: 1, gain: 2"),
        ("return torch.rand(1, 5, 8), torch.rand(1, 3)", "return 3", "it returns a int"),
        ("x.amax(1)", "(x.amax(1) if x.sum() > 0 else x[:, 0])", "does not export it"),
        ("import torch\n", "import torch\nimport torch.nn as\n", r"net\.py:3: it is not Python"),
    ],
)
def test_code_that_fails_is_refused_with_its_line(
    tmp_path: Path, old: str, new: str, words: str
) -> None:
    assert old in NET
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "other.py").write_text("")
    with pytest.raises((RecipeError, CheckpointError), match=words):
        load(section(tmp_path, NET.replace(old, new)), tmp_path / "out")


def test_a_file_beside_the_recipe_does_not_replace_a_package(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("1 / 0")
    with pytest.raises(RecipeError, match="Rename torch"):
        load(section(tmp_path), tmp_path / "out")
