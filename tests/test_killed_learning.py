"""A model that learns again, killed at any instant, ends in the same bundle.

reduce, recover and qat are killed in turn, at a random instant of their own length. Training keeps
its values after every step, so that most kills fall between what was kept and the next step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import write_rows, write_tiny_bert, write_tiny_recipe
from tests.test_killed import Runner, finished, killed, manifest

STAGES = ("reduce", "recover", "qat")
LEARN = "data: {source: json, files: [learn.jsonl]}, held_out: 16, batch_size: 8, steps: 40"
SECTIONS = (
    f"reduce: {{goal: {{keep: 0.7}}, methods: [width, depth], recover: {{{LEARN}}}}}\n"
    f"qat: {{{LEARN}}}\n"
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, shared_folder: Path) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("learning")
    file = write_tiny_recipe(folder / "recipe", write_tiny_bert(folder / "model", layers=3))
    write_rows(file.parent / "learn.jsonl", 100, seed=9)
    text = file.read_text().replace("max_drop: 0.1", "max_drop: 0.9")
    text = text.replace("onnxruntime, device: cpu, threads: 1", "compressed-tensors, float: fp32")
    file.write_text(text.replace("quantize:\n", f"{SECTIONS}quantize:\n"))
    started = Runner(file, shared_folder, keep_seconds=0)
    yield started
    started.close()


@pytest.fixture(scope="module")
def undisturbed(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run nobody killed."""
    home = tmp_path_factory.mktemp("undisturbed")
    assert runner.run(home) == 0
    return home


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_training_goes_on_and_ends_in_the_same_bundle(
    runner: Runner, undisturbed: Path, tmp_path: Path, seed: int
) -> None:
    homes = (tmp_path / str(n) for n in range(8))
    tried = ((home, 0.9 / 2**n) for n, home in enumerate(homes))
    home = next(h for h, share in tried if killed(runner, undisturbed, h, seed, share, STAGES))
    before = finished(home)
    assert runner.run(home) == 0
    after = finished(home)
    assert {k: after[k] for k in before} == before, "a finished step was redone"
    assert manifest(home)["content_digest"] == manifest(undisturbed)["content_digest"]
    assert not list(home.glob("**/*.partial"))
