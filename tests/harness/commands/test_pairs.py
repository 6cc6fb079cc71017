"""`predict` with a model that was judged on pairs of texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.harness import tasks
from optimizer.harness.commands import command_line, queries
from optimizer.harness.errors import InputError
from optimizer.harness.inputs.question import QUESTION
from optimizer.harness.tasks.answering import Query

NAMES = ("text", "text_pair")


def opened(task: str, *fields: str) -> Any:
    """A bundle that was judged on rows with these fields."""
    recipe = {"validate": {"data": {"columns": {field: field for field in fields}}}}
    return SimpleNamespace(manifest={"recipe": recipe}, task=tasks.find_task(task))


def test_only_a_model_that_was_judged_on_pairs_needs_them() -> None:
    assert queries.accepts_pairs(opened("text-ranking", "text", "text_pair", "score"))
    assert queries.accepts_pairs(opened("text-classification", "text", "text_pair", "score"))
    assert not queries.accepts_pairs(opened("text-classification", "text", "label"))
    assert not queries.accepts_pairs(opened("sentence-embedding", "text", "text_pair"))


def test_a_text_alone_is_refused_with_the_option_for_the_other() -> None:
    with pytest.raises(InputError, match="--pair: absent, and this model reads pairs"):
        queries.refuse_single_texts(command_line.parse_arguments(["predict", "a"]), NAMES)


def test_a_line_of_standard_input_is_an_object_of_both_texts() -> None:
    line = Query("line 1", '{"text_pair": "b", "text": "a"}')
    assert queries.parse_pairs([line], NAMES) == [Query("line 1", "a", "b")]
    line = Query("line 1", '{"context": "b", "question": "a"}')
    asked = queries.parse_pairs([line], QUESTION.fields)
    assert asked == [Query("line 1", "a", "b")]


@pytest.mark.parametrize(
    "line", ["a", '["a", "b"]', '{"text": "a"}', '{"text": "a", "text_pair": 1}']
)
def test_another_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(InputError, match="line 7: it is not an object with two texts"):
        queries.parse_pairs([Query("line 7", line)], NAMES)
