"""A trained smaller model is a checkpoint like any other, and a hop of the ledger proves it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.foundation.state import CompressedState
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import (
    CompressedTensorsTarget,
    DataSpec,
    Quantize,
    Recovery,
    Validate,
    Validation,
)
from optimizer.reduce.learn import recover
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce.training_laws import recover as hop_recover
from optimizer.validate.ledger.ledger import run_hop
from optimizer.validate.materials import Materials
from tests.conftest import sentences, write_rows
from tests.reduce.smaller import loaded, reduced

SECTION = Recover(
    samples=64, held_out=16, sequence_length=16, batch_size=8, steps=20, learning_rate=1e-3
)


class Run:
    """A reference, what reduce made of it, and what that learned."""

    def __init__(self, kind: str, root: Path) -> None:
        self.reference = loaded(kind, root)
        self.smaller = reduced(  # by what leaves most to be learned
            self.reference, root / "smaller", {"keep": 0.7}, importance="magnitude"
        )
        write_rows(root / "texts.jsonl", 100, seed=5)
        task = json.loads((self.reference / "contract.json").read_text())["task"]
        rows = DataSpec(source="json", files=("texts.jsonl",), base=str(root))
        self.section = Recovery(recover=SECTION, data=rows, task=task)
        self.learned = root / "learned"
        self.learned.mkdir()
        recover.run(self.section, self.reference, self.smaller, self.learned)

    def hop(self, learned: Path) -> LedgerEntry:
        generates = self.section.task == "text-generation"
        metric: Any = "perplexity" if generates else "cosine"
        validation = Validation(
            validate=Validate(data=self.section.data, metric=metric, max_drop=0.1),
            quantize=Quantize(),
            calibrate=None,
            recovery=self.section,
            target=CompressedTensorsTarget(runtime="compressed-tensors"),
        )
        none = [self.smaller] * 4
        materials = Materials(
            validation,
            learned,
            *none,
            texts=sentences(6, seed=9),
            original=self.reference,
            smaller=self.smaller,
            untrained=learned,
        )
        materials.state = CompressedState({})
        return run_hop(hop_recover, materials)


@pytest.fixture(scope="module", params=["bert", "llama"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(request.param, tmp_path_factory.mktemp(request.param))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "checkpoint" / "model.safetensors")
    return loaded


def test_the_checkpoint_is_the_smaller_one_with_trained_values(run: Run) -> None:
    before, after = tensors(run.smaller), tensors(run.learned)
    document = json.loads((run.learned / "recovered.json").read_text())
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    assert changed
    assert changed <= {*document["trained"]}
    assert not any("embed" in name or "wte" in name for name in changed)
    assert document["end"]["output"] < document["start"]["output"]
    for name in ("contract.json", "reduced.json"):
        assert (run.learned / name).read_bytes() == (run.smaller / name).read_bytes()
    assert not (run.learned / "progress").exists()


def test_transformers_loads_it_with_nothing_missing(run: Run) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if run.section.task == "text-generation" else AutoModel
    _, info = auto.from_pretrained(run.learned / "checkpoint", output_loading_info=True)
    assert all("pooler" in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]


def test_the_hop_passes_what_was_learned(run: Run) -> None:
    entry = run.hop(run.learned)
    assert entry.problems == ()
    assert entry.ok
    assert entry.measured is not None
    assert entry.measured.worst > 0


Fault = Callable[[dict[str, torch.Tensor]], None]


def first(t: dict[str, torch.Tensor], *endings: str) -> str:
    return next(n for n in sorted(t) if n.endswith(endings))


def embedding_moved(t: dict[str, torch.Tensor]) -> None:
    t[first(t, "word_embeddings.weight", "embed_tokens.weight")][3] += 1e-3


def value_not_finite(t: dict[str, torch.Tensor]) -> None:
    t[first(t, "output.dense.weight", "down_proj.weight")][0, 0] = float("nan")


def tensor_lost(t: dict[str, torch.Tensor]) -> None:
    del t[first(t, "output.dense.weight", "down_proj.weight")]


def rows_swapped(t: dict[str, torch.Tensor]) -> None:
    name = first(t, "output.dense.weight", "down_proj.weight")
    t[name] = t[name].roll(1, 0)


def not_learned(t: dict[str, torch.Tensor]) -> None:
    """One linear as it was before."""
    name = first(t, "output.dense.weight", "down_proj.weight")
    t[name] = t[name] * 0.98


FAULTS = {
    embedding_moved: "is not trained",
    value_not_finite: "NaN or infinity",
    tensor_lost: "is not in the trained checkpoint",
    rows_swapped: "training measured",
    not_learned: "training measured",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_named_at_the_hop(run: Run, tmp_path: Path, fault: Fault) -> None:
    folder = tmp_path / "learned"
    shutil.copytree(run.learned, folder)
    changed = tensors(folder)
    fault(changed)
    save_file(changed, folder / "checkpoint" / "model.safetensors")
    entry = run.hop(folder)
    assert entry.ok is False
    assert FAULTS[fault] in "; ".join(entry.problems)


def test_what_follows_is_predicted_from_the_smaller_model() -> None:
    assert recover.STAGE.shapes is not None
    assert recover.STAGE.shapes(None, {"w": (8, 4)}, {"w": (6, 4)}) == {"w": (6, 4)}
