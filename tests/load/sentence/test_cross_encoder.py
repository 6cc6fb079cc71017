"""A model of one label answers as sentence-transformers' CrossEncoder does."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load import text_inputs
from optimizer.load.sentence import cross_encoder
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.conftest import sentences, write_tiny_bert
from tests.load.conftest import Load, edit_json

PAIRS = list(zip(sentences(8, seed=1), sentences(8, seed=2), strict=True))
SAVED = {
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
    "Identity": "torch.nn.modules.linear.Identity",
}


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder with a head of one label."""
    return write_tiny_bert(tmp_path_factory.mktemp("scorer"), labels=("LABEL_0",), seed=2)


def answer(out: Path) -> list[float]:
    contract = contracts.read(out / "contract.json")
    texts, pairs = (list(column) for column in zip(*PAIRS, strict=True))
    batch = tasks.encode(contract, load_tokenizer(out / "checkpoint", contract), texts, pairs)
    with torch.no_grad():
        model = load_torch_model(open_checkpoint(out), contract.task)
        logits = model(**{n: torch.from_numpy(a) for n, a in batch.items()}).logits.numpy()
    values = tasks.decode(contract, {"logits": logits}, batch)
    return [one["value"] for one in tasks.build_answers(contract, values, batch)]


@pytest.mark.parametrize("saved", ["Sigmoid", "Identity", None])
def test_the_harness_scores_as_the_cross_encoder_does(
    load: Load,
    scorer: Path,
    tmp_path: Path,
    saved: str | None,
) -> None:
    library = pytest.importorskip("sentence_transformers")
    folder = tmp_path / "model"
    if saved is None:
        shutil.copytree(scorer, folder)
    else:
        function = getattr(torch.nn, saved)()
        library.CrossEncoder(str(scorer), device="cpu", activation_fn=function).save_pretrained(
            str(folder)
        )
    expected = library.CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    got = answer(load(folder, task="text-classification"))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert np.ptp(got) > 0.01


MISREAD: dict[str, tuple[Any, str, Any, str]] = {
    "another activation": (
        cross_encoder,
        "read_activation",
        lambda *_, **__: "identity",
        "the score",
    ),
    "another length": (text_inputs, "read_max_length", lambda *_: 40, "the logit"),
    "another half": (
        tasks,
        "encode",
        lambda contract, encoder, texts, pairs: ENCODE(contract, encoder, pairs, texts),
        "the logit",
    ),
}
ENCODE = tasks.encode


@pytest.mark.parametrize("name", MISREAD)
def test_a_score_of_another_reading_is_refused(
    load: Load, scorer: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sentence_transformers")
    module, function, wrong, message = MISREAD[name]
    monkeypatch.setattr(module, function, wrong)
    with pytest.raises(CheckpointError, match=f"has {message}.*CrossEncoder"):
        load(scorer, task="text-ranking")


def test_the_scores_of_the_library_are_said_to_be_ours(
    load: Load, scorer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers")
    load(scorer, task="text-ranking")
    assert "33 pairs have the scores of sentence-transformers' CrossEncoder" in (
        capsys.readouterr().err
    )


def config(labels: int = 1, **fields: Any) -> Any:
    return SimpleNamespace(id2label=dict(enumerate("abc"[:labels])), **fields)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (config(), "sigmoid"),
        (config(problem_type="regression"), "identity"),
        (config(sentence_transformers={"activation_fn": SAVED["Identity"]}), "identity"),
        (config(sbert_ce_default_activation_function="torch.nn.Identity"), "identity"),
        (config(sbert_ce_default_activation_function=SAVED["Sigmoid"]), "sigmoid"),
        (config(3), None),
        (config(3, sentence_transformers={"activation_fn": SAVED["Identity"]}), None),
    ],
)
def test_the_activation_is_the_saved_one_or_the_librarys_default(
    found: Any, expected: str | None, tmp_path: Path
) -> None:
    assert cross_encoder.read_activation(tmp_path, found) == expected


def test_a_ranker_without_a_saved_activation_takes_the_sigmoid(tmp_path: Path) -> None:
    found = config(problem_type="regression")
    assert cross_encoder.read_activation(tmp_path, found, ranks=True) == "sigmoid"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_fn": "torch.nn.modules.activation.Tanh"}, r"Tanh.*not covered"),
        ({"activation_fn": "mine.Scale"}, r"mine\.Scale.*not covered"),
        ({"default_prompt_name": "q", "prompts": {"q": "query: "}}, "prompt 'q'"),
    ],
)
def test_settings_that_the_harness_lacks_are_refused_by_name(
    load: Load,
    scorer: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    message: str,
) -> None:
    folder = Path(shutil.copytree(scorer, tmp_path / "model"))
    edit_json(folder / cross_encoder.SETTINGS, model_type="CrossEncoder", **changes)
    with pytest.raises(CheckpointError, match=message):
        load(folder, task="text-classification")


def test_no_logit_overflows_the_sigmoid() -> None:
    made = contracts.Contract("text-classification", (), (), labels=("a",), activation="sigmoid")
    logits = np.array([[-1000.0], [-90.0], [0.0], [1000.0]], np.float32)
    values = [one["value"] for one in tasks.look_up(made).answers(made, logits, None)]  # type: ignore[arg-type]
    assert values == pytest.approx([0, float(np.exp(-90.0)), 0.5, 1], rel=1e-5)


def test_a_classifier_of_two_labels_is_no_ranker(load: Load, tiny_classifier: Path) -> None:
    with pytest.raises(CheckpointError, match="the model has 2 labels"):
        load(tiny_classifier, task="text-ranking")
