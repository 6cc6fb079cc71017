"""A student of its own: laid out to stand in the reference's place, and taught by it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.state import CompressedState
from optimizer.harness import contract as contracts
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.recipe.reduce import Reduce, Student
from optimizer.recipe.schema import (
    CompressedTensorsTarget,
    DataSpec,
    Model,
    Quantize,
    Recovery,
    Reduction,
    Validate,
    Validation,
)
from optimizer.reduce import stage
from optimizer.reduce.learn import recover
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.laws.reduce import student_laws, training_laws
from optimizer.validate.ledger.ledger import run_hop
from optimizer.validate.materials import Materials
from tests.compress import checkpoints
from tests.conftest import sentences, write_rows, write_tiny_bert
from tests.reduce.smaller import TASKS, loaded, write_model

LEARN = Recover(
    samples=64, held_out=16, sequence_length=16, batch_size=8, steps=20, learning_rate=2e-3
)
SIZES: dict[str, dict[str, int]] = {
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 48},
    "llama": {"hidden_size": 48, "head_dim": 12, "num_hidden_layers": 2, "intermediate_size": 64},
}


def only_config(model: Path, folder: Path, **changes: Any) -> Path:
    """A folder with a config.json alone."""
    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def section(task: str, student: Path, seed: int = 0) -> Reduction:
    chosen = Student(source=str(student), seed=seed)
    return Reduction(reduce=Reduce(student=chosen, recover=LEARN), calibrate=None, task=task)


def made(reference: Path, student: Path, out: Path, seed: int = 0) -> Path:
    out.mkdir()
    task = json.loads((reference / "contract.json").read_text())["task"]
    stage.run(section(task, student, seed), reference, out=out)
    return out


class Run:
    """A reference, a student, and what it learned."""

    def __init__(self, kind: str, given: bool, root: Path) -> None:
        self.reference = loaded(kind, root)
        if given:  # with weights of its own
            source = write_model(kind, root / "own", layers=2)
        else:
            source = only_config(root / "model", root / "config", **SIZES[kind])
        self.smaller = made(self.reference, source, root / "smaller")
        write_rows(root / "texts.jsonl", 100, seed=5)
        self.task = TASKS["encoder" if kind == "bert" else "decoder"]
        self.data = DataSpec(source="json", files=("texts.jsonl",), base=str(root))
        self.section = Recovery(recover=LEARN, data=self.data, task=self.task)
        self.learned = root / "learned"
        self.learned.mkdir()
        recover.run(self.section, self.reference, self.smaller, self.learned)

    def hop(self, hop: Callable[[Materials], LedgerEntry], smaller: Path) -> LedgerEntry:
        metric: Any = "perplexity" if self.task == "text-generation" else "cosine"
        validation = Validation(
            validate=Validate(data=self.data, metric=metric, max_drop=0.1),
            quantize=Quantize(),
            calibrate=None,
            recovery=self.section,
            target=CompressedTensorsTarget(runtime="compressed-tensors"),
        )
        materials = Materials(
            validation,
            self.learned,
            *[smaller] * 4,
            texts=sentences(6, seed=9),
            original=self.reference,
            smaller=smaller,
            untrained=self.learned,
        )
        materials.state = CompressedState({})
        return run_hop(hop, materials)


CASES = {
    "an encoder with weights": ("bert", True),
    "an encoder without": ("bert", False),
    "a narrower decoder without": ("llama", False),
}


@pytest.fixture(scope="module", params=CASES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(*CASES[request.param], tmp_path_factory.mktemp("student"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = load_file(folder / "checkpoint" / "model.safetensors")
    return loaded


def test_it_learns_and_both_hops_pass(run: Run) -> None:
    document = json.loads((run.learned / "recovered.json").read_text())
    assert document["end"]["output"] < document["start"]["output"]
    assert document["end"]["hidden"] < document["start"]["hidden"]
    entry = run.hop(student_laws.reduce, run.smaller)
    assert entry.problems == ()
    assert entry.ok
    assert "no law of structure holds" in entry.unproven
    learned = run.hop(training_laws.recover, run.smaller)
    assert learned.problems == ()
    assert learned.ok


def test_embeddings_are_trained_only_of_one_that_has_none(run: Run) -> None:
    before, after = tensors(run.smaller), tensors(run.learned)
    changed = {n for n in before if not torch.equal(before[n], after[n])}
    document = json.loads((run.smaller / "reduced.json").read_text())
    embedded = any("word_embeddings" in n or "embed_tokens" in n for n in changed)
    assert embedded == document["student"]["initialized"]
    assert not any(n.startswith("map") for n in after)


def test_transformers_loads_it_with_the_reference_s_tokenizer(run: Run) -> None:
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM if run.task == "text-generation" else AutoModel
    _, info = auto.from_pretrained(run.learned / "checkpoint", output_loading_info=True)
    assert all("pooler" in name for name in info["missing_keys"])
    assert not info["unexpected_keys"]
    one, other = (f / "checkpoint" / "tokenizer.json" for f in (run.reference, run.learned))
    assert one.read_bytes() == other.read_bytes()
    contracts.read(run.learned / "contract.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: in_json(f / "contract.json", "pooling", "cls"), "pooling differs"),
        (lambda f: in_json(f / "checkpoint/tokenizer.json", "version", "2"), "differs from"),
        (lambda f: lost(f / "checkpoint/model.safetensors"), "does not find it"),
    ],
    ids=["pooling", "tokenizer", "a lost tensor"],
)
def test_a_planted_fault_is_named_at_the_hop(
    change: Callable[[Path], None], words: str, run: Run, tmp_path: Path
) -> None:
    shutil.copytree(run.smaller, tmp_path / "smaller")
    change(tmp_path / "smaller")
    entry = run.hop(student_laws.reduce, tmp_path / "smaller")
    assert entry.ok is False
    assert words in "; ".join(entry.problems)


def in_json(file: Path, key: str, value: str) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def lost(file: Path) -> None:
    held, ends = load_file(file), ("output.dense.weight", "down_proj.weight")
    held.pop(next(name for name in sorted(held) if name.endswith(ends)))
    save_file(held, file)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded("bert", tmp_path_factory.mktemp("bert"))


def test_its_first_weights_are_the_seed_s(bert: Path, tmp_path: Path) -> None:
    config = only_config(bert.parent / "model", tmp_path / "config", **SIZES["bert"])
    one, again, other = (
        tensors(made(bert, config, tmp_path / name, seed))
        for name, seed in (("one", 0), ("again", 0), ("other", 1))
    )
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert any(not torch.equal(one[n], other[n]) for n in one)


def test_one_with_weights_is_what_it_was(bert: Path, tmp_path: Path) -> None:
    source = write_model("bert", tmp_path / "own", layers=1)
    before = load_file(source / "model.safetensors")
    after = tensors(made(bert, source, tmp_path / "out"))
    assert all(torch.equal(after[n], before[n]) for n in after)


def test_a_killed_stage_begins_again(bert: Path, tmp_path: Path) -> None:
    config = only_config(bert.parent / "model", tmp_path / "config", **SIZES["bert"])
    whole = made(bert, config, tmp_path / "whole")
    killed = tmp_path / "killed"
    (killed / "progress" / "loaded" / "checkpoint").mkdir(parents=True)
    (killed / "checkpoint").mkdir()
    (killed / "checkpoint" / "config.json").write_text("{")
    stage.run(section("sentence-embedding", config), bert, out=killed)
    assert checkpoints.contents(killed) == checkpoints.contents(whole)


def test_another_vocabulary_is_refused_by_its_size(bert: Path, tmp_path: Path) -> None:
    config = only_config(bert.parent / "model", tmp_path / "config", vocab_size=9)
    with pytest.raises(CheckpointError, match="the student's vocabulary has 9 tokens"):
        stage.check(section("sentence-embedding", config), bert)
    with pytest.raises(CheckpointError, match="the student's vocabulary has 9 tokens"):
        made(bert, config, tmp_path / "out")


def test_other_ids_are_refused_with_the_first_of_them(bert: Path, tmp_path: Path) -> None:
    source = write_model("bert", tmp_path / "own", layers=1)
    file = source / "tokenizer.json"
    document = json.loads(file.read_text())
    known = document["model"]["vocab"]
    one, two = sorted(known)[-2:]
    known[one], known[two] = known[two], known[one]
    file.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=rf"2 tokens have other ids.*{re.escape(repr(one))}"):
        made(bert, source, tmp_path / "out")


def test_one_that_takes_other_inputs_is_refused(bert: Path, tmp_path: Path) -> None:
    config = only_config(bert.parent / "model", tmp_path / "config", type_vocab_size=1)
    with pytest.raises(CheckpointError, match="the reference's input_ids, attention_mask, token_"):
        made(bert, config, tmp_path / "out")


def test_one_with_fewer_positions_is_refused_at_its_place(bert: Path, tmp_path: Path) -> None:
    config = only_config(bert.parent / "model", tmp_path / "config", max_position_embeddings=32)
    with pytest.raises(Exception, match=r"reduce\.student.*32 positions"):
        made(bert, config, tmp_path / "out")


@pytest.mark.parametrize("heads", [4, 2])
def test_attention_is_learned_whether_or_not_heads_are_as_many(heads: int, tmp_path: Path) -> None:
    reference = loaded("llama", tmp_path)
    write_rows(tmp_path / "texts.jsonl", 100, seed=5)
    data = DataSpec(source="json", files=("texts.jsonl",), base=str(tmp_path))
    weights = LossWeights(attention=1)
    section = Recovery(
        recover=LEARN.model_copy(update={"losses": weights}), data=data, task="text-generation"
    )
    sizes = {**SIZES["llama"], "num_attention_heads": heads}
    config = only_config(tmp_path / "model", tmp_path / "config", **sizes)
    smaller, out = made(reference, config, tmp_path / "smaller"), tmp_path / "out"
    out.mkdir()
    recover.run(section, reference, smaller, out)
    document = json.loads((out / "recovered.json").read_text())
    assert document["end"]["attention"] < document["start"]["attention"]


def test_the_licences_of_both_travel_with_it(bert: Path, tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(bert, reference)
    (reference / "checkpoint" / "LICENSE").write_text("the reference's")
    source = write_model("bert", tmp_path / "own", layers=1)
    (source / "LICENSE").write_text("the student's")
    folder = made(reference, source, tmp_path / "out") / "checkpoint"
    assert (folder / "LICENSE").read_text() == "the reference's"
    assert (folder / "LICENSE.student").read_text() == "the student's"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("classifier")
    model = write_tiny_bert(root / "model", labels=("negative", "positive"), layers=3)
    out = root / "reference"
    out.mkdir()
    LOAD.run(Model(source=str(model), task="text-classification"), out=out)
    return out


def test_a_classifier_without_weights_has_the_reference_s_labels(
    classifier: Path, tmp_path: Path
) -> None:
    model = classifier.parent / "model"
    config = only_config(model, tmp_path / "config", **SIZES["bert"], id2label={"0": "a"})
    out = made(classifier, config, tmp_path / "out")
    held = json.loads((out / "checkpoint" / "config.json").read_text())
    assert held["id2label"] == {"0": "negative", "1": "positive"}
    assert tensors(out)["classifier.weight"].shape == (2, 64)


def test_a_classifier_of_other_labels_is_refused(classifier: Path, tmp_path: Path) -> None:
    source = write_tiny_bert(tmp_path / "own", labels=("a", "b", "c"), layers=1)
    with pytest.raises(CheckpointError, match="3 labels and the reference 2"):
        made(classifier, source, tmp_path / "out")


def test_what_load_says_of_it_is_said_at_its_place(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^reduce\.student\.source: folder "):
        made(bert, tmp_path / "nowhere", tmp_path / "out")
