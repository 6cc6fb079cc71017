"""Each input gets its answer, in order and independent of its batch."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness import tasks
from optimizer.harness.errors import InputError
from optimizer.harness.output import format_json, format_text, write
from optimizer.harness.tasks.answering import Answered, Predictor, Query, answer, group_by_length
from tests.harness import small_model


class Model:
    """Model whose hidden state is the token id, or NaN in rows with the id `broken`."""

    def __init__(self, broken: int = -1) -> None:
        self.broken, self.shapes = broken, list[tuple[int, ...]]()

    def __call__(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        ids = arrays["input_ids"]
        self.shapes.append(ids.shape)
        hidden = np.repeat(ids[..., None].astype(np.float32), small_model.WIDTH, -1)
        hidden[(ids == self.broken).any(1)] = np.nan
        return {"last_hidden_state": hidden}


def served(folder: Path, model: Model) -> Predictor:
    contract, tokenizer = small_model.opened(folder, normalize=False)
    return Predictor(contract, tokenizer, model)


def ask(texts: Sequence[str]) -> list[Query]:
    return [Query(f"line {i}", t) for i, t in enumerate(texts, 1)]


LONG = " ".join(["good"] * 50)
TEXTS = ["good", "bad film", LONG, "a good film", "bad", LONG, "film film film", "a"]


@given(st.lists(st.integers(0, 50)), st.integers(1, 9))
def test_batches_hold_each_row_once_and_neighbours_in_length(lengths: list[int], size: int) -> None:
    groups = group_by_length(lengths, size)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert all(0 < len(g) <= size for g in groups)
    assert groups == sorted(sorted(g) for g in groups)
    spans = sorted((min(s), max(s)) for g in groups if (s := [lengths[i] for i in g]))
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_answers_are_those_of_each_text_alone_in_the_order_of_the_texts(tmp_path: Path) -> None:
    model = Model()
    encoder = served(tmp_path, model)
    alone = [next(answer(encoder, [a], 1)) for a in ask(TEXTS)]
    model.shapes.clear()
    assert list(answer(encoder, ask(TEXTS), 3)) == alone
    assert max(shape[1] for shape in model.shapes if shape[0] == 3 and shape[1] < 32) < 6
    assert len(model.shapes) == 3


def test_an_answer_comes_before_the_batches_of_later_texts_are_run(tmp_path: Path) -> None:
    model = Model()
    found = answer(served(tmp_path, model), ask(TEXTS), 1)
    for i in range(len(TEXTS)):
        assert next(found).where == f"line {i + 1}"
        assert len(model.shapes) == i + 1


def test_a_text_without_a_token_has_its_error_in_its_place(tmp_path: Path) -> None:
    silent = ["", "   ", "\t", "\u200b"]
    texts = [t for pair in zip(TEXTS, silent, strict=False) for t in pair]
    found = list(answer(served(tmp_path, Model()), ask(texts), 4))
    assert [f.where for f in found] == [f"line {i}" for i in range(1, 9)]
    assert [f.error is None for f in found] == [True, False] * 4
    assert str(found[1].error) == ("line 2: the text has no token. Give at least one word.")


def test_only_blank_texts_run_no_model(tmp_path: Path) -> None:
    model = Model()
    assert len(list(answer(served(tmp_path, model), ask(["", " "]), 4))) == 2
    assert model.shapes == []


def test_a_blank_text_with_a_pair_is_answered(tmp_path: Path) -> None:
    (found,) = answer(served(tmp_path, Model()), [Query("text 1", "", "good")], 4)
    assert found.error is None


@pytest.mark.parametrize("pair", [None, LONG])
def test_a_cut_text_says_how_many_tokens_it_had(pair: str | None, tmp_path: Path) -> None:
    encoder = served(tmp_path, Model())
    asked = [Query("a", "good"), Query("b", LONG, pair)]
    short, long = answer(encoder, asked, 2)
    again, _ = answer(encoder, asked, 2)  # counting leaves the tokenizer as it was
    assert short == again
    assert (short.tokens, short.kept, short.truncated) == (3, 3, False)
    words = 50 if pair is None else 100
    assert (long.tokens, long.kept) == (words + (2 if pair is None else 3), 32)
    assert long.truncated


def test_numbers_that_are_nan_are_the_error_of_their_own_text(tmp_path: Path) -> None:
    broken = small_model.VOCABULARY.index("bad")
    found = list(answer(served(tmp_path, Model(broken)), ask(TEXTS), 8))
    assert [i for i, f in enumerate(found) if f.error is not None] == [1, 4]
    assert str(found[4].error).startswith("line 5: output last_hidden_state")
    assert write(found, lambda _: None).exit_code == 2


@pytest.mark.parametrize("text", ["", "  ", "\ud800", "good \udcff"])
def test_encode_refuses_what_no_model_can_read(text: str, tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    with pytest.raises(InputError, match=r"texts\[1\]: (the text has no token|character)"):
        tasks.encode(contract, tokenizer, ["good", text])


def test_the_summary_counts_what_was_cut_and_what_has_no_answer() -> None:
    error = InputError("no token", where="line 2")
    answers = [
        Answered("line 1", {"label": "a", "score": 1.0}, None, 40, 32),
        Answered("line 2", None, error, 2, 2),
        Answered("line 3", {"label": "a", "score": 1.0}, None, 1812, 32),
    ]
    summary = write(answers, lambda _: None)
    assert summary.exit_code == 2
    assert summary.lines == [
        "2 of 3 texts were truncated to 32 tokens; the longest, line 3, has 1,812 tokens",
        "1 of 3 texts failed; the first: line 2: no token",
    ]
    quiet = write([Answered("line 1", {}, None, 5, 5)], lambda _: None)
    assert (quiet.exit_code, quiet.lines) == (0, [])


ANSWERS: list[tuple[str, dict[str, Any]]] = [
    ("sentence-embedding", {"embedding": [1.0] * 9}),
    ("feature-extraction", {"hidden_states": [[1.0] * 4] * 2}),
    ("text-classification", {"label": "two\nlines", "score": 0.5, "scores": {}}),
    ("text-classification", {"label": "x", "value": 0.5}),
    ("token-classification", {"words": [], "entities": [{"text": "a\u2028b\n", "label": "x"}]}),
    ("token-classification", {"words": [], "entities": []}),
]


@pytest.mark.parametrize(("task", "result"), ANSWERS)
def test_an_answer_is_one_line_in_either_form(task: str, result: dict[str, Any]) -> None:
    answered = Answered("line 1", result)
    for line in (format_text(answered, tasks.find_task(task)), format_json(answered, "ort")):
        assert line
        assert "\n" not in line
    assert len(format_json(answered, "ort").splitlines()) == 1


def test_texts_with_unknown_tokens_are_a_warning(tmp_path: Path) -> None:
    queries = ask(["good film", "a 7", "7 7"])
    summary = write(answer(served(tmp_path, Model()), queries, 2), lambda _: None)
    assert summary.exit_code == 0
    (line,) = summary.lines
    assert line.startswith("warning: 2 of 3 texts have tokens that the tokenizer does not know")
    assert "line 2: 1 of " in line
