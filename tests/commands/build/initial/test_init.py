"""`optimize init` looks at the model and at the data, and marks what is left to decide."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from optimizer import checks
from optimizer.cli import main
from optimizer.commands.build.initial import model as models
from optimizer.data.datasets import read_samples
from optimizer.foundation.errors import DataError
from optimizer.load import source
from optimizer.recipe import file as recipe_file
from tests.conftest import sentences, write_tiny_bert


def init(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, words)])


def write_rows(file: Path, labels: Sequence[str]) -> Path:
    texts = list(dict.fromkeys(sentences(120)))
    rows = [f"{i},{t},{labels[i % len(labels)]}" for i, t in enumerate(texts)]
    file.write_text("\n".join(["number,review,mood", *rows]) + "\n")
    return file


def changed(source: Path, folder: Path, **fields: object) -> Path:
    """A copy whose config.json has these fields; None removes one."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def test_a_model_and_a_file_make_a_recipe_that_check_accepts(
    tmp_path: Path, tiny_classifier: Path
) -> None:
    names = json.loads((tiny_classifier / "config.json").read_text())["id2label"]
    labels = [names[key].upper() for key in sorted(names)]
    rows, out = write_rows(tmp_path / "rows.csv", labels), tmp_path / "recipe.yaml"
    result = init(tiny_classifier, "--data", rows, "--out", out)
    assert result.exit_code == 0, result.output
    assert "DECIDE" not in out.read_text().replace("# DECIDE: this processor", "")
    recipe, _ = checks.read(out, (), fetch=False, early=True)
    assert recipe.validate_.data.columns == {"text": "review", "label": "mood"}
    assert list(recipe.validate_.data.labels) == labels
    assert recipe.validate_.metric == "accuracy"


def test_without_labels_of_the_model_the_float_model_is_the_measure(
    tmp_path: Path, tiny_classifier: Path
) -> None:
    rows = write_rows(tmp_path / "rows.csv", ["red", "green", "blue", "grey"])
    result = init(tiny_classifier, "--data", rows, "--split", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert "metric: cosine" in result.stdout
    assert "no column with labels" in result.stderr


def test_a_score_that_no_column_is_named_for_is_an_open_point(tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "model", labels=("relevance",))
    rows = write_rows(tmp_path / "rows.csv", ["0", "1", "3"])
    result = init(model, "--data", rows, "--split", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert "# DECIDE: no column was found for the score" in result.stdout
    assert "metric: spearman" in result.stdout
    assert "cosine" not in result.stdout
    assert "not used: number, mood" in result.stdout


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"config_sentence_transformers.json": {"model_type": "CrossEncoder"}}, "text-ranking"),
        ({}, "text-classification"),
    ],
)
def test_a_folder_that_cross_encoder_wrote_is_a_ranker_of_pairs(
    settings: dict[str, object], task: str, tmp_path: Path
) -> None:
    model = write_tiny_bert(tmp_path / "model", labels=("LABEL_0",))
    for name, document in settings.items():
        (model / name).write_text(json.dumps(document))
    texts = list(dict.fromkeys(sentences(160, seed=4)))
    rows = [
        {
            "text": texts[60 + i % (100 if task == "text-classification" else 30)],
            "question": f"{texts[i // 4]} again",
            "relevance": int(i % 4 == 0),
        }
        for i in range(100)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = init(model, "--data", file, "--split", tmp_path / "parts")
    assert result.exit_code == 0, result.output
    assert f"  task: {task}\n" in result.stdout
    assert ("set task: text-ranking" in result.stderr) == (task != "text-ranking")
    if task == "text-ranking":
        columns = "columns: {text: question, text_pair: text, score: relevance}"
        assert columns in result.stdout
        assert "  metric: ndcg\n" in result.stdout
        assert re.search(r"the evaluation has 1\d queries in \d\d rows", result.stderr)


def test_questions_and_their_contexts_make_a_recipe_that_check_accepts(tmp_path: Path) -> None:
    model = changed(
        write_tiny_bert(tmp_path / "bert"),
        tmp_path / "model",
        architectures=["BertForQuestionAnswering"],
    )
    weights = load_file(model / "model.safetensors")
    head = {"qa_outputs.weight": torch.zeros(2, 64), "qa_outputs.bias": torch.zeros(2)}
    named = {f"bert.{n}": t for n, t in weights.items() if not n.startswith("pooler.")}
    save_file(named | head, model / "model.safetensors", {"format": "pt"})
    texts = list(dict.fromkeys(sentences(160, seed=4)))
    rows = [
        {"id": i, "question": texts[i], "context": text, "answers": {"text": text.split()[: i % 2]}}
        for i, text in enumerate(texts[80:])
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "qa.yaml"
    assert init(model, "--data", file, "--out", out).exit_code == 0
    text = out.read_text()
    for line in (
        "  task: question-answering\n",
        "  answers: {handle_impossible_answer: true}",
        "    columns: {text: question, text_pair: context, answers: answers}\n",
        "  metric: f1\n",
    ):
        assert line in text
    checks.read(out, [], fetch=False)
    lines = (json.dumps({"ask": row["question"], "where": row["context"]}) + "\n" for row in rows)
    file.write_text("".join(lines))
    result = init(model, "--data", file, "--out", tmp_path / "other.yaml")
    assert "column 'ask' is used as question and 'where' as context" in result.output
    file.write_text("".join(json.dumps({"ask": row["question"], "id": 1}) + "\n" for row in rows))
    result = init(model, "--data", file, "--out", tmp_path / "none.yaml")
    assert (
        "1 column of texts was found (ask), and task question-answering reads two" in result.output
    )
    assert "It has the columns ask, id" in result.output


def test_a_recipe_has_its_files_name_and_sees_the_model_from_there(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_bert, tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path / "models")
    result = init("mine", "--out", "../recipes/First.yaml")
    assert result.exit_code == 0, result.output
    made = recipe_file.read(tmp_path / "recipes" / "First.yaml")
    assert (made.name, made.model.source) == ("first", "../models/mine")
    assert source.resolve(made.model).folder == tmp_path.resolve() / "models" / "mine"


def test_a_head_that_no_task_has_is_refused_by_its_class(tmp_path: Path, tiny_bert: Path) -> None:
    result = init(changed(tiny_bert, tmp_path / "model", architectures=["BertForMultipleChoice"]))
    assert result.exit_code == 2
    assert "no task here has the model's head (BertForMultipleChoice)" in result.output


def test_a_head_that_no_task_has_is_found_in_the_weights(tmp_path: Path, tiny_bert: Path) -> None:
    model = changed(tiny_bert, tmp_path / "model", architectures=None)
    weights = load_file(model / "model.safetensors") | {"sop.weight": torch.zeros(2, 32)}
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    result = init(model)
    assert result.exit_code == 2
    assert "no task here has the model's head (sop.weight)" in result.output


def test_a_head_without_a_class_is_that_of_the_task_that_reads_every_tensor(
    tmp_path: Path, tiny_classifier: Path
) -> None:
    result = init(changed(tiny_classifier, tmp_path / "model", architectures=None))
    assert "  task: text-classification" in result.stdout
    assert "the weights have the head of task text-classification" in result.stderr


def test_a_class_whose_head_the_weights_lack_is_told(tmp_path: Path, tiny_bert: Path) -> None:
    kind = ["BertForTokenClassification"]
    result = init(changed(tiny_bert, tmp_path / "model", architectures=kind))
    assert "  task: feature-extraction" in result.stdout
    assert "BertForTokenClassification, but the weights have no head of it" in result.stderr


def test_a_missing_model_type_is_proposed_where_it_is_certain(
    tmp_path: Path, tiny_bert: Path
) -> None:
    result = init(changed(tiny_bert, tmp_path / "model", model_type=None))
    assert result.exit_code == 0
    assert "\n  model_type: bert " in result.stdout
    assert "bert is assumed" in result.stderr


def test_a_model_type_that_is_not_certain_is_left_open(tmp_path: Path, tiny_bert: Path) -> None:
    model = changed(tiny_bert, tmp_path / "model", model_type=None, architectures=None)
    result = init(model)
    assert "\n  # model_type: bert " in result.stdout
    assert "roberta, xlm-roberta equally well: choose one" in result.stderr


def test_a_pickle_without_architectures_is_read_by_the_names_of_its_tensors(
    tmp_path: Path, tiny_bert: Path
) -> None:
    model = changed(tiny_bert, tmp_path / "model", model_type=None, architectures=None)
    weights = load_file(model / "model.safetensors")
    torch.save({f"bert.{name}": x for name, x in weights.items()}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    result = init(model)
    assert "  allow_pickle: true" in result.stdout
    assert "\n  model_type: bert " in result.stdout


def test_a_recipe_is_not_overwritten(tmp_path: Path, tiny_bert: Path) -> None:
    out = tmp_path / "recipe.yaml"
    out.write_text("mine")
    assert init(tiny_bert, "--out", out).exit_code == 2
    assert out.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_told_with_the_option(tiny_bert: Path) -> None:
    refused = init(tiny_bert, "--out", "/proc/here/my.yaml")
    assert refused.exit_code == 5
    assert "Move --out" in refused.output


def test_too_few_rows_are_refused_with_how_many_to_bring(tmp_path: Path, tiny_bert: Path) -> None:
    (tmp_path / "rows.txt").write_text("one\ntwo\n")
    result = init(tiny_bert, "--data", tmp_path / "rows.txt")
    assert result.exit_code == 2
    assert "60 or more" in result.output


def test_rows_that_all_share_a_text_are_refused(tmp_path: Path, minilm_source: Path) -> None:
    rows = tmp_path / "rows.csv"
    lines = [f"the one document,question {i}" for i in range(80)]
    rows.write_text("\n".join(["text,text_pair", *lines]) + "\n")
    result = init(minilm_source, "--data", rows, "--split", tmp_path / "parts")
    assert result.exit_code == 2
    assert "too many of 80 rows share an input" in result.stderr
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize(("text", "code"), [("{} αβ γδ εζ", 0), ("film αβγδ", 2)])
def test_a_tokenizer_that_does_not_know_the_rows_is_shown_with_a_row(
    text: str, code: int, tmp_path: Path, tiny_bert: Path
) -> None:
    rows = [text.format(sentence) for sentence in dict.fromkeys(sentences(90))]
    rows = [f"{row}{'α' * i}" for i, row in enumerate(rows)]
    (tmp_path / "rows.txt").write_text("\n".join(rows))
    result = init(tiny_bert, "--data", tmp_path / "rows.txt", "--split", tmp_path / "parts")
    assert result.exit_code == code, result.output
    assert "he tokenizer does not know" in result.stderr
    assert "[UNK]'. The model was trained with another" in result.stderr


def test_texts_are_compared_by_the_tokenizer_also_without_a_model_type(
    tmp_path: Path, tiny_bert: Path
) -> None:
    model = changed(tiny_bert, tmp_path / "model", model_type=None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    facts = models.look(str(model), None)
    assert facts.token_ids is not None
    upper, lower, other = facts.token_ids(["GOOD food", "good food", "bad food"])
    assert upper == lower != other
    assert "BertTokenizer" in facts.decisions[-1]


def test_conversations_make_a_recipe_that_check_accepts(tmp_path: Path, tiny_llama: Path) -> None:
    texts = sentences(400, seed=4)
    chats = [
        [{"role": "user", "content": f"{i} {t}"}, {"role": "assistant", "content": t}]
        for i, t in enumerate(texts)
    ]
    rows, out = tmp_path / "chat.jsonl", tmp_path / "chat.yaml"
    lines = (json.dumps({"prompt": c[0]["content"], "messages": c}) + "\n" for c in chats)
    rows.write_text("".join(lines))
    result = init(tiny_llama, "--data", rows, "--out", out)
    assert result.exit_code == 0, result.output
    recipe, _ = checks.read(out, (), fetch=False, early=True)
    assert recipe.validate_.data.columns == {"messages": "messages"}
    with pytest.raises(DataError, match="of 999 windows of"):  # as run would refuse it
        checks.read(out, ("calibrate.samples=999",), fetch=False, early=True)


def test_conversations_in_cells_of_a_csv_file_are_read_as_json(
    tmp_path: Path, tiny_llama: Path
) -> None:
    chats = [
        [{"role": "user", "content": f"{i} {t}"}, {"role": "assistant", "content": t}]
        for i, t in enumerate(sentences(400, seed=4))
    ]
    for name, write in (("json", json.dumps), ("python", str)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["chat", "id"], *([write(c), 1] for c in chats)])
    out = tmp_path / "chat.yaml"
    result = init(tiny_llama, "--data", tmp_path / "json.csv", "--out", out)
    assert result.exit_code == 0, result.output
    recipe, _ = checks.read(out, (), fetch=False, early=True)
    assert recipe.validate_.data.columns == {"messages": "chat"}
    (row,) = read_samples(recipe.validate_.data, 1)
    assert row.messages is not None
    assert row.text.startswith("user: ")
    result = init(tiny_llama, "--data", tmp_path / "python.csv", "--out", tmp_path / "no.yaml")
    assert result.exit_code == 2
    assert "is not a list of messages" in result.output
    out.write_text(out.read_text().replace("evaluate.jsonl", "nowhere.jsonl"))
    with pytest.raises(DataError, match=r"chat.yaml:\d+: validate.data: .*no file") as refused:
        checks.read(out, (), fetch=False, early=True)
    assert not refused.value.further
