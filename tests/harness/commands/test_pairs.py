"""`predict` with a model that was judged on pairs of texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optimizer.harness import tasks
from optimizer.harness.commands import command_line
from optimizer.harness.errors import InputError


def opened(task: str, *fields: str) -> Any:
    """A bundle that was judged on rows with these fields."""
    recipe = {"validate": {"data": {"columns": {field: field for field in fields}}}}
    return SimpleNamespace(manifest={"recipe": recipe}, task=tasks.task(task))


def test_a_text_alone_is_refused_with_the_option_for_the_other() -> None:
    reranker = opened("text-classification", "text", "text_pair", "score")
    alone, paired = (
        command_line.parse_arguments(["predict", "a", *more]) for more in ([], ["--pair", "b"])
    )
    with pytest.raises(InputError, match="--pair: absent, and this model reads pairs"):
        command_line._refuse_single_texts(reranker, alone)
    command_line._refuse_single_texts(reranker, paired)
    command_line._refuse_single_texts(opened("text-classification", "text", "label"), alone)
    command_line._refuse_single_texts(opened("sentence-embedding", "text", "text_pair"), alone)
