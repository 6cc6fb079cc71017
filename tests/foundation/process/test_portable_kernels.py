"""With portable kernels a model is compressed to the same bytes, whatever the processor offers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.commands.build import request
from optimizer.foundation.errors import CheckpointError, MachineError, RecipeError
from optimizer.foundation.process import portable_kernels
from optimizer.recipe import file as recipe_file
from tests.conftest import write_tiny_recipe

ROOT = Path(__file__).parents[3]
PERSONALITIES = (
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "2"},
)
"""Two processors, as far as these libraries can be told to believe in another."""
MODELS = ("compress/*/state.json", "compress/*/tensors.safetensors", "lower/*/model.onnx")


def python(code: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in portable_kernels.ENVIRONMENT}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_two_processors_make_the_same_model_with_the_flag_and_another_without(
    tmp_path: Path, tiny_bert: Path, deterministic: bool
) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    made = []
    for i, personality in enumerate(PERSONALITIES):
        store = tmp_path / f"store{i}"
        words = ["run", str(recipe), "--store", str(store), "--until", "lower"]
        words += ["--deterministic"] if deterministic else []
        python(f"from optimizer.cli import main\nmain({words!r})", **personality)
        files = [path for pattern in MODELS for path in store.glob(pattern)]
        assert len(files) == len(MODELS)
        made.append([file.read_bytes() for file in files])
    assert (made[0] == made[1]) is deterministic


SUMS = """
import torch, hashlib
from optimizer.foundation.process import portable_kernels
a = torch.sin(torch.arange(96 * 200.0)).view(96, 200)
with portable_kernels.use_portable_kernels():
    portable_kernels.check()
    values = (a @ a.T, torch.softmax(a, 1), a.sum(), torch.linalg.cholesky(a @ a.T + torch.eye(96)))
    print(*[hashlib.sha256(v.numpy().tobytes()).hexdigest() for v in values])
"""


def test_such_a_process_knows_that_it_is_one_and_sums_alike_for_every_number_of_threads() -> None:
    environment = dict(portable_kernels.ENVIRONMENT)
    one, two = (python(SUMS, OMP_NUM_THREADS=n, **environment) for n in "12")
    assert one == two


@pytest.mark.parametrize("missing", portable_kernels.ENVIRONMENT)
def test_a_process_that_lacks_part_of_it_is_refused(missing: str) -> None:
    environment = {k: v for k, v in portable_kernels.ENVIRONMENT.items() if k != missing}
    code = (
        "from optimizer.foundation import errors\n"
        "from optimizer.foundation.process import portable_kernels\n"
        "with portable_kernels.use_portable_kernels():\n"
        "    try: portable_kernels.check()\n"
        "    except errors.MachineError as e: print(e)"
    )
    assert "for this processor" in python(code, **environment)


def test_the_stage_refuses_what_it_cannot_promise(tmp_path: Path, tiny_bert: Path) -> None:
    from optimizer.compress.stage import STAGE

    file = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    recipe = recipe_file.read(file, ["compress.deterministic=true"])
    with pytest.raises(MachineError, match="this process runs"):
        STAGE.run(recipe.compression, tiny_bert, out=tmp_path)


def test_onednn_and_the_threads_are_as_before_afterwards() -> None:
    before = torch.backends.mkldnn.enabled, torch.get_num_threads()
    with portable_kernels.use_portable_kernels():
        assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == (False, 1)
    assert (torch.backends.mkldnn.enabled, torch.get_num_threads()) == before


def test_bf16_is_refused_beside_it(tmp_path: Path, tiny_bert: Path) -> None:
    file = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    words = ["check", str(file), "--deterministic", "--set", "compress.precision=bf16"]
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, "use precision: fp32" in result.stderr) == (2, True), result.stderr


LEARNS = "{goal: {keep: 0.8}, recover: {device: cpu, precision: fp32, samples: 300%s}}"


@pytest.mark.parametrize(
    ("reduce", "named"),
    [
        (LEARNS % "", ""),
        (LEARNS.replace("cpu", "auto") % "", "recover.device is auto"),
        (LEARNS.replace("fp32", "auto") % "", "recover.precision is auto"),
        (LEARNS % ", max_hours: 1.0", "recover.max_hours is 1.0"),
        (LEARNS % ", processes: 2", "recover.processes is 2"),
        ("{goal: {latency_gain: 1.5}}", "latency_gain chooses sizes"),
    ],
)
def test_what_depends_on_the_machine_anyway_is_refused_beside_it(
    tmp_path: Path, tiny_bert: Path, reduce: str, named: str
) -> None:
    file = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    words = [f"reduce={reduce}", "compress.deterministic=true"]
    if not named:
        assert recipe_file.read(file, words).compress.deterministic
        return
    with pytest.raises(RecipeError, match=named):
        recipe_file.read(file, words)
    recipe_file.read(file, words[:1])


def test_what_the_other_process_ends_with_is_said_once(
    tmp_path: Path, tiny_bert: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tmp_path / "model")
    (tmp_path / "model").mkdir()
    asked = request.RunRequest(recipe, (), tmp_path / "store", tmp_path / "artifacts")
    with pytest.raises(CheckpointError) as caught:
        request._compute_portably(asked, "compress")
    assert str(tmp_path / "model") in str(caught.value)
    assert "error:" not in capfd.readouterr().err
