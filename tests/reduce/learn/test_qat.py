"""A compressed model that was trained: a checkpoint and a state that belong together, proven."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from optimizer.foundation.process.launch import Processes
from optimizer.foundation.process.torch_device import CPU
from optimizer.recipe.recover import Qat
from optimizer.recipe.schema import (
    CompressedTensorsTarget,
    DataSpec,
    QuantizationAware,
    Quantize,
    Validate,
    Validation,
    Weights,
)
from optimizer.reduce.learn import qat
from optimizer.validate.ledger import hops
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce import training_laws
from optimizer.validate.ledger.ledger import run_hop
from optimizer.validate.materials import Materials
from tests.compress import checkpoints
from tests.compress.conftest import loaded as loaded
from tests.conftest import sentences, write_rows
from tests.gpu.stand_in import stand_in

SECTION = Qat(samples=64, held_out=16, sequence_length=16, batch_size=8, steps=30)
OPTIONS: dict[str, Any] = {
    "method": "smoothquant",
    "bias_correction": True,
    "weights": Weights(bits=4, granularity="group", group_size=16),
    **checkpoints.W8A8,
}


class Run:
    """A reference, what compress made of it, and what that learned."""

    def __init__(self, reference: Path, root: Path) -> None:
        self.reference, self.learned = reference, root / "learned"
        self.compressed = checkpoints.compress(reference, root / "compressed", **OPTIONS)
        write_rows(root / "texts.jsonl", 100, seed=5)
        rows = DataSpec(source="json", files=("texts.jsonl",), base=str(root))
        self.section = QuantizationAware(qat=SECTION, data=rows, task="sentence-embedding")
        self.learned.mkdir()
        qat.run(self.section, reference, reference, self.compressed, self.learned)

    def hop(self, hop: Callable[[Materials], LedgerEntry], learned: Path) -> LedgerEntry:
        validation = Validation(
            validate=Validate(data=self.section.data, metric="cosine", max_drop=0.1),
            quantize=Quantize(**OPTIONS),
            calibrate=checkpoints.section(self.reference).calibrate,
            training=self.section,
            target=CompressedTensorsTarget(runtime="compressed-tensors"),
        )
        none = [learned] * 3
        before = {"original": self.reference, "untrained": self.reference}
        materials = Materials(
            validation, learned, learned, *none, texts=sentences(6, seed=9), **before
        )
        return run_hop(hop, materials)


@pytest.fixture(scope="module")
def run(loaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(loaded, tmp_path_factory.mktemp("qat"))


def test_it_loses_less_than_before_and_every_hop_passes(run: Run) -> None:
    document = json.loads((run.learned / "trained.json").read_text())
    assert document["end"]["output"] < document["start"]["output"]
    for hop in (training_laws.qat, hops.fold, hops.compress):
        entry = run.hop(hop, run.learned)
        assert entry.problems == ()
        assert entry.ok


def test_a_killed_training_resumes_to_the_same_bytes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer.reduce.learn import training

    class Killed(BaseException):
        pass

    def dies(self: Any, backward: Any) -> None:
        if self.done == 10:
            self.save()
            raise Killed
        original(self, backward)

    original = training._Run.step
    monkeypatch.setattr(training._Run, "step", dies)
    with pytest.raises(Killed):
        qat.run(run.section, run.reference, run.reference, run.compressed, tmp_path)
    monkeypatch.undo()
    qat.run(run.section, run.reference, run.reference, run.compressed, tmp_path)
    assert checkpoints.contents(tmp_path) == checkpoints.contents(run.learned)


Fault = Callable[[Path], None]


def in_file(change: Callable[[dict[str, torch.Tensor]], None], file: str) -> Fault:
    def fault(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file)

    return fault


def row_of_integers(t: dict[str, torch.Tensor]) -> None:
    name = next(n for n in sorted(t) if n.endswith("output.dense.weight.codes"))
    t[name] = t[name].roll(1, 0)


def scale(t: dict[str, torch.Tensor]) -> None:
    name = next(n for n in sorted(t) if n.endswith("output.dense.weight.scale"))
    t[name][0] *= 2


def norm(t: dict[str, torch.Tensor]) -> None:
    name = next(n for n in sorted(t) if n.endswith("layer.1.output.LayerNorm.weight"))
    t[name] = t[name] * 0.9


def embedding(t: dict[str, torch.Tensor]) -> None:
    t["embeddings.word_embeddings.weight"][7] += 1e-3


CHECKPOINT, STATE = "checkpoint/model.safetensors", "tensors.safetensors"
FAULTS: dict[str, tuple[Fault, Any, str]] = {
    "integers of another row": (in_file(row_of_integers, STATE), hops.compress, "other values"),
    "a scale doubled": (in_file(scale, STATE), hops.compress, "other values"),
    "a norm weight as it never was": (in_file(norm, CHECKPOINT), training_laws.qat, "measured"),
    "an embedding moved": (in_file(embedding, CHECKPOINT), training_laws.qat, "not trained"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(run: Run, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "learned"
    shutil.copytree(run.learned, folder)
    change, hop, words = FAULTS[fault]
    change(folder)
    entry = run.hop(hop, folder)
    assert entry.ok is False
    assert words in "; ".join(entry.problems)


def test_a_range_as_it_never_was_is_named(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    shutil.copytree(run.learned, folder)
    document = json.loads((folder / "state.json").read_text())
    site = sorted(document["ranges"])[0]
    document["ranges"][site] = [2 * end for end in document["ranges"][site]]
    (folder / "state.json").write_text(json.dumps(document))
    entry = run.hop(training_laws.qat, folder)
    assert entry.ok is False
    assert "was trained" in "; ".join(entry.problems)


def test_what_follows_is_predicted_from_the_model_that_was_compressed() -> None:
    assert qat.STAGE.shapes is not None
    assert qat.STAGE.shapes(None, {"w": (8, 4)}, {"w": (6, 4)}, {}) == {"w": (6, 4)}


def test_a_run_killed_while_it_tidied_up_is_finished(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "learned"
    shutil.copytree(run.learned, folder)
    (folder / "progress.done" / "checkpoint").mkdir(parents=True)  # half removed
    qat.run(run.section, run.reference, run.reference, run.compressed, folder)
    assert checkpoints.contents(folder) == checkpoints.contents(run.learned)
    assert not (folder / "progress.done").exists()


def test_a_gpu_gets_every_tensor_and_trains_the_same_values(run: Run, tmp_path: Path) -> None:
    few = SECTION.model_copy(update={"steps": 2, "learning_rate": 1e-3})
    section = run.section.model_copy(update={"qat": few})

    def values(device: torch.device, folder: Path) -> dict[str, torch.Tensor]:
        folder.mkdir()
        folders = run.reference, run.reference, run.compressed, folder
        return qat.learn(Processes(device=device), section, *folders)[1].values

    with sdpa_kernel(SDPBackend.MATH):  # the stand-in has no other kernel of attention
        with stand_in() as gpu:
            there = values(gpu, tmp_path / "gpu")
        here = values(CPU, tmp_path / "cpu")
    assert all(torch.equal(there[name], here[name]) for name in here)
