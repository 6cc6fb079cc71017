"""The wheel holds the product: every file below optimizer/, and the command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from optimizer import __version__

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    skip = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(ROOT / "optimizer", source / "optimizer", ignore=skip)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    return file


def test_every_file_of_the_product_is_in_the_wheel(wheel: Path) -> None:
    found = (ROOT / "optimizer").rglob("*")
    files = [f for f in found if f.is_file() and "__pycache__" not in f.parts]
    assert {str(f.relative_to(ROOT)) for f in files} <= set(zipfile.ZipFile(wheel).namelist())


def test_nothing_but_the_product_is_in_the_wheel(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"optimizer", f"optimize_toolchain-{__version__}.dist-info"}


def test_the_command_answers_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = "import optimizer.cli; print(optimizer.__file__); optimizer.cli.main(['--version'])"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path / "site")},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    place, version = ended.stdout.splitlines()
    assert Path(place).is_relative_to(tmp_path)
    assert version.endswith(__version__)
