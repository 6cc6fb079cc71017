"""No file of the user's ends a command in a way that is called our bug, hangs, or eats memory.

Generated cases (groups.py), each through the real command in a fork of a warm process. A share
of them here, evenly drawn; all of them are marked slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hostile.case import Worker, described, run
from tests.hostile.groups import decoder_folder, encoder_folder, groups

EVERY = {"recipes": 5, "encoders": 16, "decoders": 20, "data": 4, "gguf": 3, "oddities": 24}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("good")
    return encoder_folder(folder / "encoder"), decoder_folder(folder / "decoder")


@pytest.mark.parametrize("group", EVERY)
def test_a_share_of_the_wrong_files_is_answered_with_a_sentence(
    group: str, worker: Worker, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    good, cases = groups(*folders)[group]
    failures = run(worker, cases[:: EVERY[group]], good, tmp_path)
    assert not failures, described(failures)


@pytest.mark.slow
@pytest.mark.parametrize("group", EVERY)
def test_every_wrong_file_is_answered_with_a_sentence(
    group: str, worker: Worker, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    good, cases = groups(*folders)[group]
    failures = run(worker, cases, good, tmp_path)
    assert not failures, described(failures)


def test_there_are_six_hundred_cases_or_more(folders: tuple[Path, Path]) -> None:
    sizes = {name: len(cases) for name, (_, cases) in groups(*folders).items()}
    shared = sum(-(-size // EVERY[name]) for name, size in sizes.items())
    assert sum(sizes.values()) >= 600
    assert shared >= 300, sizes
