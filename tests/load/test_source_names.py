"""Names that no model and no file of one can have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from optimizer.foundation.errors import CheckpointError
from optimizer.load import source
from optimizer.recipe.schema import Model


@pytest.mark.parametrize("name", ["modeł", "a..b/c", "a--b", "owner/name."])
def test_what_is_no_name_on_the_hub_is_refused_without_asking_it(name: str) -> None:
    with pytest.raises(CheckpointError, match=r"model\.source"):
        source.resolve(Model(source=name, task="sentence-embedding"))


def test_a_file_whose_name_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / os.fsdecode(b"\xff.txt")).touch()
    with pytest.raises(CheckpointError, match=r"\\udcff\.txt' is not UTF-8"):
        source.list_files(source.resolve(Model(source=str(tmp_path), task="sentence-embedding")))
