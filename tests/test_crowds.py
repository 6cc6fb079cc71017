"""Runs at once on one artifacts folder: the same bundle, whole, whoever comes and whoever dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_tiny_recipe


@pytest.mark.slow
def test_fifty_crowds_end_in_one_bundle(tmp_path: Path, tiny_bert: Path) -> None:
    """About ten minutes. tests/publish/test_folder.py is the short one."""
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    command = [sys.executable, "-m", "tests.crowd", str(recipe), str(tmp_path / "home")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["wrong"] == []
    assert figures["rounds"] == 50
    assert figures["kills"] >= 10
