"""Two processes learn what one does: the sum of their gradients is the gradient of the batch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from optimizer.foundation.errors import CheckpointError, MachineError
from optimizer.foundation.process import launch as launches
from optimizer.foundation.process.launch import ALONE
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.recipe.schema import DataSpec, Recovery
from optimizer.reduce.learn import processes, recover
from optimizer.reduce.learn.processes import launch
from tests.conftest import write_rows
from tests.reduce.learn.shared_ends import be_killed_last, end, fail_and_linger
from tests.reduce.learn.shared_regression import KINDS, Forked, Shared, regress
from tests.reduce.learn.test_training import Regression, killed_at
from tests.reduce.smaller import loaded, reduced

SECTION = Recover(
    samples=64, held_out=16, sequence_length=16, batch_size=8, steps=12, learning_rate=1e-3,
    precision="fp32", losses=LossWeights(hidden=0),
)  # fmt: skip


class Prepared:
    """A reference, what reduce made of it, and windows of text, which weigh alike in a batch."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reference = loaded("llama", root)
        self.smaller = reduced(
            self.reference, root / "smaller", {"keep": 0.7}, importance="magnitude"
        )
        write_rows(root / "texts.jsonl", 200, seed=5)
        rows = DataSpec(source="json", files=("texts.jsonl",), base=str(root))
        self.section = Recovery(recover=SECTION, data=rows, task="text-generation")

    def learned(self, name: str, **options: object) -> Path:
        out = self.root / name
        out.mkdir()
        section = self.section.model_copy(update={"recover": SECTION.model_copy(update=options)})
        recover.run(section, self.reference, self.smaller, out)
        return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    loaded: dict[str, torch.Tensor] = load_file(folder / "checkpoint" / "model.safetensors")
    return loaded


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of both kinds of regression, trained by two processes."""
    folder = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        (folder / kind.__name__).mkdir()
    launch(regress, SECTION.model_copy(update={"processes": 2}), folder, folder)
    return folder


def test_two_processes_follow_the_gradient_of_the_whole_batch(
    trained: Path, tmp_path: Path
) -> None:
    one = Regression()
    alone = one.train(tmp_path / "alone")
    together = Shared(ALONE)
    together.backward = killed_at(0, together.backward)  # type: ignore[method-assign]
    left = together.train_shared(trained / "Shared")  # takes what they left, and makes no step
    points = zip([*alone.held_out, *alone.train], [*left.held_out, *left.train], strict=True)
    assert all(a[0] == b[0] and abs(a[1] - b[1]) < 1e-3 * a[1] for a, b in points)
    a, b = (task.weight.detach() for task in (one, together))
    assert float((a - b).abs().max()) < 1e-3 * float(a.abs().max())
    assert not (trained / launches.MEETING).exists()


def test_what_the_rows_of_one_process_reach_is_learned_by_all(trained: Path) -> None:
    left = Forked(ALONE)
    left.train_shared(trained / "Forked")  # takes what they left, and makes no step
    assert float(left.bias.detach()) > 0


@pytest.mark.slow
def test_a_model_learns_in_two_processes_what_it_learns_in_one(prepared: Prepared) -> None:
    one, two = (prepared.learned(f"by {n}", processes=n) for n in (1, 2))
    document = json.loads((two / "recovered.json").read_text())
    assert document["processes"] == 2
    assert document["end"]["output"] < document["start"]["output"]
    before, alone, together = map(weights, (prepared.smaller, one, two))
    moved = max(float((alone[n] - before[n]).abs().max()) for n in before)
    apart = max(float((alone[n] - together[n]).abs().max()) for n in before)
    assert apart < moved / 100  # a share left out, or counted twice, is another direction


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            CheckpointError("the loss is nan", where="here", fix="Change it."),
            CheckpointError,
            r"^here: the loss is nan\. Change it\.$",
        ),
        (ValueError("of 2 shapes"), ProcessRaisedException, "Process 1:\n.*ValueError: of 2"),
    ],
)
def test_why_the_first_one_ended_is_raised_where_torch_sees_the_other_end_first(
    error: Exception, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    section = SECTION.model_copy(update={"processes": 2})
    with pytest.raises(kind, match=f"(?s){message}"):
        launch(fail_and_linger, section, tmp_path, tmp_path, error)
    assert list(tmp_path.iterdir()) == []


def test_an_abort_of_a_process_whose_peer_raised_is_not_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "failure.json"
    file.write_text(json.dumps({"rank": 1, "traceback": "ValueError: of 2 shapes"}))
    group = launches.Group(2, "cpu", "qat.processes", "")
    seen = ProcessExitedException("", 0, 7, -signal.SIGABRT)
    error = launches._error_of(file, [-signal.SIGABRT, 1], seen, group)
    assert isinstance(error, ProcessRaisedException)
    assert "of 2 shapes" in str(error)
    file.unlink()
    assert "process 0 of 2" in str(launches._error_of(file, [-signal.SIGABRT, 1], seen, group))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_one_that_was_killed_is_named_where_torch_sees_the_other_end_first(
    tmp_path: Path,
) -> None:
    section = SECTION.model_copy(update={"processes": 2})
    with pytest.raises(MachineError, match="process 1 of 2 was ended from outside"):
        launch(be_killed_last, section, tmp_path)


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_the_others_end(tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"processes": 2})
    with pytest.raises(MachineError, match="process 1 of 2 was ended from outside"):
        launch(end, section, tmp_path)


START = """
import sys
from pathlib import Path
from optimizer.reduce.learn.processes import launch
from tests.reduce.learn.shared_ends import wait
from tests.reduce.learn.test_processes import SECTION
folder = Path(sys.argv[1])
if __name__ == "__main__":
    launch(wait, SECTION.model_copy(update={"processes": 2}), folder, folder)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_none_outlives_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, script, tmp_path], env=environment) as parent:
        while len(started := list(tmp_path.glob("*.pid"))) < 2:
            assert parent.poll() is None
        parent.kill()
    children = [Path("/proc", file.stem, "stat") for file in started]
    while any(c.exists() and c.read_text().split()[2] not in "ZX" for c in children):
        pass  # ends, or the test is stopped by its limit of time


def test_a_share_of_each_is_all_of_them_once() -> None:
    items = list(range(7))
    shares = [replace(ALONE, rank=rank, count=3).share(items) for rank in range(3)]
    assert sorted(item for share in shares for item in share) == items


def test_more_processes_than_rows_are_refused() -> None:
    with pytest.raises(ValidationError, match="processes is 9, and a batch has only 8 rows"):
        Recover(batch_size=8, processes=9)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU")
    with pytest.raises(
        MachineError, match=r"reduce.recover.device: torch .* (finds no GPU|without CUDA)"
    ):
        processes.check(Recover(device="cuda"))
    assert processes.choose_device(Recover()).type == "cpu"
    assert processes.count_of(Recover()) == 1
