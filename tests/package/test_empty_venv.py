"""A bundle runs in an empty virtual environment after `pip install -r requirements.txt`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness import tasks
from optimizer.harness.contract import read
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.publish.address import BundleAddress
from optimizer.publish.pull import pull
from optimizer.publish.push import push
from optimizer.publish.registries.layout import OciLayout
from tests.conftest import sentences
from tests.package.bundles import small_bundle

TEXTS = sentences(5, seed=21)


@pytest.fixture(scope="session")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty_venv")
    small_bundle.make(folder)
    return folder


@pytest.fixture(scope="session")
def bundle(steps: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the bundle, away from our sources."""
    return Path(shutil.copytree(steps / "package" / "bundle", tmp_path_factory.mktemp("b") / "x"))


@pytest.fixture(scope="session")
def python(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has what requirements.txt says and nothing else."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    made = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(made)]  # to install another takes seconds
    install = [*pip, "install", "--quiet", "--disable-pip-version-check"]
    requirements = ["-r", str(bundle / "requirements.txt")]
    subprocess.run([*install, *requirements], check=True, capture_output=True)
    return made


def run(python: Path, bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    return subprocess.run(
        [str(python), "-W", "error", *arguments],
        cwd=bundle,
        env=environment,
        capture_output=True,
        text=True,
    )


def answers(done: subprocess.CompletedProcess[str]) -> list[Any]:
    """The JSON object of each line."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_neither_torch_nor_transformers_nor_this_project_is_there(
    python: Path, bundle: Path
) -> None:
    for name in ("torch", "transformers", "optimizer", "onnx", "pydantic"):
        done = run(python, bundle, "-c", f"import {name}")
        assert "ModuleNotFoundError" in done.stderr, name


def test_its_answers_are_the_evaluators_bit_for_bit(
    python: Path, bundle: Path, steps: Path
) -> None:
    contract = read(steps / "steps" / "source" / "contract.json")
    tokenizer = load_tokenizer(steps / "steps" / "source" / "checkpoint", contract)
    batch = tasks.encode(contract, tokenizer, TEXTS)
    with OrtRunner(steps / "steps" / "lower0" / "model.onnx", threads=1) as runner:
        values = tasks.decode(contract, runner.infer(batch), batch)
    wanted = tasks.build_answers(contract, values, batch)
    done = run(python, bundle, "-m", "harness", "predict", "--json", *TEXTS)
    assert done.returncode == 0, done.stderr
    assert [a["embedding"] for a in answers(done)] == [w["embedding"] for w in wanted]
    assert done.stderr == ""


@pytest.fixture(scope="session")
def with_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose first target is a TensorRT-RTX engine, built here."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    folder = tmp_path_factory.mktemp("with_engine")
    made = small_bundle.make(folder, (small_bundle.RTX, small_bundle.ORT)) / "bundle"
    return Path(shutil.copytree(made, tmp_path_factory.mktemp("copied") / "x"))


def test_with_onnxruntime_alone_it_falls_back_from_an_engine_says_so_and_answers_the_same(
    python: Path, bundle: Path, with_engine: Path
) -> None:
    assert list(with_engine.glob("engines/tensorrt-rtx-cuda/model.engine"))
    plain = run(python, bundle, "-m", "harness", "predict", "--json", *TEXTS)
    done = run(python, with_engine, "-m", "harness", "predict", "--json", *TEXTS)
    assert done.returncode == 0, done.stderr
    assert {a["engine"] for a in answers(done)} == {"onnxruntime-cpu"}
    assert answers(done) == answers(plain)
    said = "falling back: tensorrt-rtx-cuda: package: tensorrt-rtx and cuda-bindings are not"
    assert done.stderr.startswith(said)
    checked = json.loads(run(python, with_engine, "-m", "harness", "check", "--json").stdout)
    assert [(e["target"], e["how"]) for e in checked["engines"]] == [
        ("tensorrt-rtx-cuda", None),
        ("onnxruntime-cpu", "load"),
    ]


@pytest.mark.parametrize("arguments", [("check",), ("bench", "--iterations", "5", "--sequence=8")])
def test_the_other_commands_run_there_too(
    arguments: tuple[str, ...], python: Path, bundle: Path
) -> None:
    done = run(python, bundle, "-m", "harness", *arguments)
    assert done.returncode == 0, done.stderr
    assert "onnxruntime-cpu" in done.stdout


def test_what_was_published_and_pulled_answers_alike(
    python: Path, bundle: Path, tmp_path: Path
) -> None:
    at = BundleAddress("1", "", folder=tmp_path / "layout")
    push(bundle, OciLayout(tmp_path / "layout"), "1")
    pulled = pull(OciLayout(tmp_path / "layout"), at, tmp_path / "pulled").folder
    here, there = (
        run(python, at, "-m", "harness", "predict", "--json", *TEXTS) for at in (bundle, pulled)
    )
    assert (there.returncode, len(answers(there))) == (0, len(TEXTS)), there.stderr
    assert there.stdout == here.stdout


def test_a_signature_that_cannot_be_verified_here_is_not_passed_over(
    python: Path, bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").touch()
    done = run(
        python, bundle, "-m", "harness", "check", "--require-signature", str(tmp_path / "key")
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert "pip install cryptography" in done.stderr
