"""A student learns what its teacher answers, from text alone, and a killed run resumes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.foundation.errors import CheckpointError, DataError
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.recipe.schema import DataSpec, Model
from optimizer.reduce.learn import distill as distillation
from optimizer.reduce.learn.distill import Distilled, distill, draw_texts
from optimizer.reduce.learn.pair import Kept, TeacherAndStudent, open_pair
from optimizer.reduce.learn.recover import read_kept
from tests.conftest import write_rows, write_tiny_bert
from tests.decoders import write_tiny_decoder
from tests.reduce import smaller

SECTION = Recover(
    samples=64, held_out=16, sequence_length=16, batch_size=8, steps=30, learning_rate=1e-3
)

WHOLE = Kept(range(2), [None, None])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path, str], Path]:
    """Folder of load with a model for a task."""

    def load(model: Path, task: str) -> Path:
        folder = tmp_path_factory.mktemp(task) / "load"
        folder.mkdir()
        LOAD.run(Model(source=str(model), task=task), out=folder)
        return folder

    return load


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "texts.jsonl", 200, seed=5)
    columns = {"text": "text", "label": "label"}
    return DataSpec(
        source="json",
        files=("texts.jsonl",),
        base=str(folder),
        columns=columns,
        labels=("negative", "positive"),
    )


def damaged(pair: TeacherAndStudent) -> TeacherAndStudent:
    """The student with a quarter of its neurons silenced."""
    with torch.no_grad():
        for name, p in pair.student.named_parameters():
            if p.shape[0] == 128 and p.ndim == 2:
                assert "embed" not in name
                p[::4] = 0
    return pair


def learn(
    source: Path,
    rows: DataSpec,
    folder: Path,
    *,
    keep_seconds: float = 60.0,
    products: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[TeacherAndStudent, Distilled]:
    section = SECTION.model_copy(update=changes)
    pair = damaged(open_pair(source, source, WHOLE, section.losses))
    sets = draw_texts(section, rows, pair.contract, source / "checkpoint")
    pair = replace(pair, products=products)
    return pair, distill(pair, section, sets, folder, keep_seconds=keep_seconds)


CASES = {
    "sentence-embedding": "tiny_bert",
    "feature-extraction": "tiny_bert",
    "text-classification": "tiny_classifier",
    "text-generation": "tiny_llama",
}


@pytest.mark.parametrize("task", CASES)
def test_a_damaged_student_comes_nearer_in_every_loss(
    task: str,
    loaded: Callable[[Path, str], Path],
    rows: DataSpec,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    source = loaded(request.getfixturevalue(CASES[task]), task)
    pair, learned = learn(source, rows, tmp_path)
    assert learned.start.keys() == learned.end.keys() == {"output", "hidden"}
    assert all(0 < learned.end[name] < learned.start[name] for name in learned.start)
    assert learned.curve.best[1] == learned.end["output"]
    for name, trained in learned.weights.items():
        assert torch.equal(pair.student.get_parameter(name), trained)


@pytest.fixture(scope="module")
def bert(loaded: Callable[[Path, str], Path], tiny_bert: Path) -> Path:
    return loaded(tiny_bert, "sentence-embedding")


@pytest.fixture(scope="module")
def llama(loaded: Callable[[Path, str], Path], tiny_llama: Path) -> Path:
    return loaded(tiny_llama, "text-generation")


def test_embeddings_and_what_is_tied_to_them_stay(bert: Path, llama: Path) -> None:
    for source, untouched in ((bert, "embeddings."), (llama, "model.embed_tokens.")):
        pair = open_pair(source, source, WHOLE, LossWeights())
        rest = {n for n, _ in pair.student.named_parameters()} - pair.trained.keys()
        assert rest
        assert all(name.startswith(untouched) for name in rest)


def test_a_student_that_is_its_teacher_learns_nothing(
    bert: Path, rows: DataSpec, tmp_path: Path
) -> None:
    pair = open_pair(bert, bert, WHOLE, LossWeights())
    sets = draw_texts(SECTION, rows, pair.contract, bert / "checkpoint")
    before = {n: p.detach().clone() for n, p in pair.student.named_parameters()}
    learned = distill(pair, SECTION, sets, tmp_path)
    assert set(learned.start.values()) == {0.0}
    assert all(torch.equal(p, before[n]) for n, p in pair.student.named_parameters())


class Killed(BaseException):
    """Nothing that the code under test could catch by mistake."""


def test_a_killed_distillation_resumes_to_the_same_bits(
    bert: Path, rows: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, whole = learn(bert, rows, tmp_path / "whole")
    original, count = TeacherAndStudent.losses, iter(range(10_000))

    def dies(*args: Any) -> Any:
        if next(count) == 41:  # somewhere after a measurement
            raise Killed
        return original(*args)

    monkeypatch.setattr(TeacherAndStudent, "losses", dies)
    with pytest.raises(Killed):
        learn(bert, rows, tmp_path / "killed", keep_seconds=0)
    monkeypatch.undo()
    assert (tmp_path / "killed" / "checkpoint").is_dir()
    _, resumed = learn(bert, rows, tmp_path / "killed")
    assert resumed.curve == whole.curve
    assert all(torch.equal(resumed.weights[n], w) for n, w in whole.weights.items())


def identity_block(model: nn.Module, index: int) -> None:
    """Of a pre-norm decoder: nothing is added to what comes in."""
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.get_submodule(f"model.layers.{index}.{name}").weight.zero_()  # type: ignore


def test_a_student_without_a_block_that_did_nothing_agrees(llama: Path, rows: DataSpec) -> None:
    pair = open_pair(llama, llama, Kept([1], [None]), LossWeights())
    identity_block(pair.teacher, 0)
    layers: Any = pair.student.get_submodule("model")
    layers.layers = nn.ModuleList([layers.layers[1]])
    layers.layers[0].self_attn.layer_idx = 0
    layers.config.num_hidden_layers = 1
    batch = draw_texts(SECTION, rows, pair.contract, llama / "checkpoint")[0].batch(range(4))
    each = pair.losses(batch, None, LossWeights(), 1.0)
    assert {name: float(v) for name, v in each.items()} == {"output": 0.0, "hidden": 0.0}


def test_in_bf16_a_student_learns_too_and_is_judged_in_float32(
    bert: Path, llama: Path, tmp_path: Path, rows: DataSpec
) -> None:
    for source in (bert, llama):
        folders = [tmp_path / source.parent.name / name for name in ("fp32", "bf16")]
        types = (torch.float32, torch.bfloat16)
        plain, lower = (
            learn(source, rows, folder, products=p)[1]
            for folder, p in zip(folders, types, strict=True)
        )
        assert plain.start == lower.start
        assert plain.end != lower.end
        assert all(lower.end[name] < lower.start[name] for name in lower.start)


def test_attention_and_labels_have_losses_of_their_own(
    loaded: Callable[[Path, str], Path], rows: DataSpec, tiny_classifier: Path, tmp_path: Path
) -> None:
    source = loaded(tiny_classifier, "text-classification")
    weights = LossWeights(output=0, hidden=0, attention=1, labels=1)
    _, learned = learn(source, rows, tmp_path, losses=weights)
    assert learned.start.keys() == {"output", "attention", "labels"}
    units = learned.start
    ends = [learned.end[name] / units[name] for name in ("attention", "labels")]
    assert sum(ends) < 2


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_attention_of_a_kept_head_is_compared_with_the_head_it_was_made_of(
    kind: str, tmp_path: Path
) -> None:
    reference = smaller.loaded(kind, tmp_path)
    options = {"methods": ["heads"], "importance": "magnitude"}
    cut = smaller.reduced(reference, tmp_path / "cut", {"keep": 0.85}, **options)
    pair = open_pair(reference, cut, read_kept(cut), LossWeights(attention=1))
    data = DataSpec(source="json", files=(str(tmp_path / "reference.jsonl"),))
    batch = draw_texts(SECTION, data, pair.contract, reference / "checkpoint")[0].batch(range(4))
    mine, theirs = pair.answers(batch, LossWeights(attention=1))
    heads = pair.pairing.heads[0]
    assert heads is not None
    assert len(heads) == mine.attentions[0].shape[1] < theirs.attentions[0].shape[1]
    torch.testing.assert_close(mine.attentions[0], theirs.attentions[0][:, list(heads)])
    right = pair.losses(batch, None, LossWeights(attention=1), 1.0)["attention"]
    other = [None if h is None else list(h)[::-1] for h in pair.pairing.heads]
    swapped = replace(pair, pairing=replace(pair.pairing, heads=other))
    assert right < swapped.losses(batch, None, LossWeights(attention=1), 1.0)["attention"]


def test_attention_of_unequal_heads_is_compared_as_their_mean(
    bert: Path, rows: DataSpec, loaded: Callable[[Path, str], Path], tmp_path: Path
) -> None:
    weights = LossWeights(attention=1)
    wider = write_tiny_bert(tmp_path / "model")
    config = json.loads((wider / "config.json").read_text()) | {"num_attention_heads": 2}
    (wider / "config.json").write_text(json.dumps(config))
    pair = open_pair(bert, loaded(wider, "sentence-embedding"), None, weights)
    batch = draw_texts(SECTION, rows, pair.contract, bert / "checkpoint")[0].batch(range(4))
    mine, theirs = pair.answers(batch, weights)
    assert mine.attentions[0].shape[1] * 2 == theirs.attentions[0].shape[1]
    assert pair.losses(batch, None, weights, 1.0)["attention"] > 0
    twice = replace(pair, teacher=pair.student)
    assert twice.losses(batch, None, weights, 1.0)["attention"] == 0


def test_texts_of_as_many_tokens_share_a_batch_whatever_their_characters(
    bert: Path, tmp_path: Path
) -> None:
    short, long = "a b c d e f g h", "the"
    write = [{"text": f"{short} {i}"} for i in range(8)]
    write += [{"text": f"{long} {i} " + "the" * 20} for i in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in write))
    data = DataSpec(source="json", files=("texts.jsonl",), base=str(tmp_path))
    section = SECTION.model_copy(update={"held_out": 1, "samples": 16})
    pair = open_pair(bert, bert, WHOLE, LossWeights())
    learned = draw_texts(section, data, pair.contract, bert / "checkpoint").learned
    masks = [learned.batch([i])["attention_mask"] for i in range(len(learned.rows))]
    assert learned.lengths == [int(mask.sum()) for mask in masks]


def test_a_teacher_that_drops_at_random_is_refused(
    bert: Path, rows: DataSpec, tmp_path: Path
) -> None:
    pair = open_pair(bert, bert, WHOLE, LossWeights())
    pair.teacher.train()
    sets = draw_texts(SECTION, rows, pair.contract, bert / "checkpoint")
    with pytest.raises(CheckpointError, match="differently twice"):
        distill(pair, SECTION, sets, tmp_path)


def test_nothing_is_learned_from_what_judges(bert: Path, rows: DataSpec) -> None:
    pair = open_pair(bert, bert, WHOLE, LossWeights())
    learned, held_out = draw_texts(SECTION, rows, pair.contract, bert / "checkpoint")
    assert len(held_out.rows) == SECTION.held_out
    assert len(learned.rows) == SECTION.samples - SECTION.held_out
    assert not {r.text for r in learned.rows} & {r.text for r in held_out.rows}


def test_too_few_texts_are_refused_with_how_many_it_takes(bert: Path, rows: DataSpec) -> None:
    pair = open_pair(bert, bert, WHOLE, LossWeights())
    section = SECTION.model_copy(update={"held_out": 60})
    with pytest.raises(DataError, match="68 or more"):
        draw_texts(section, rows, pair.contract, bert / "checkpoint")


def test_logits_are_never_held_for_more_than_a_bound(
    llama: Path, rows: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = learn(llama, rows, tmp_path / "whole")[1]
    monkeypatch.setattr(distillation, "LOGITS", 320 * 16 * 3)  # three windows of eight
    parts = learn(llama, rows, tmp_path / "parts")[1]
    assert parts.end["output"] == pytest.approx(whole.end["output"], rel=1e-2)


def test_a_model_that_answers_with_a_number_learns_it(
    loaded: Callable[[Path, str], Path], rows: DataSpec, tmp_path: Path
) -> None:
    source = loaded(write_tiny_bert(tmp_path / "model", labels=("score",)), "text-classification")
    unlabelled = rows.model_copy(update={"columns": {"text": "text"}, "labels": ()})
    _, learned = learn(source, unlabelled, tmp_path / "run")
    assert 0 < learned.end["output"] < learned.start["output"]


def test_fewer_samples_than_what_is_held_out_and_a_batch_are_refused_in_the_recipe() -> None:
    with pytest.raises(ValueError, match="288 or more"):
        Recover(samples=64)


def test_positions_are_not_trained(loaded: Callable[[Path, str], Path], tmp_path: Path) -> None:
    source = loaded(write_tiny_decoder(tmp_path / "gpt2", "gpt2"), "text-generation")
    pair = open_pair(source, source, WHOLE, LossWeights())
    assert not [name for name in pair.trained if "wpe" in name or "wte" in name]


def test_a_block_that_is_shared_is_compared_at_each_of_its_uses(tmp_path: Path) -> None:
    reference = smaller.loaded("albert", tmp_path)
    options = {"methods": ["ffn"], "importance": "magnitude"}
    cut = smaller.reduced(reference, tmp_path / "cut", {"keep": 0.7}, **options)
    pair = open_pair(reference, cut, read_kept(cut), LossWeights())
    uses = pair.student.config.num_hidden_layers  # type: ignore[union-attr]
    assert list(pair.pairing.states) == list(range(1, uses + 1))
    data = DataSpec(source="json", files=(str(tmp_path / "reference.jsonl"),))
    batch = draw_texts(SECTION, data, pair.contract, reference / "checkpoint")[0].batch(range(4))
    assert float(pair.losses(batch, None, LossWeights(), 1.0)["hidden"]) > 0
