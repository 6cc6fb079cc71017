"""No telemetry: neither our code nor a library's leaves files outside the named folders or resolves
an address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import write_tiny_recipe
from tests.package.bundles import generation_bundle, small_bundle

ROOT = Path(__file__).parent.parent.parent
STRACE = shutil.which("strace")
REPORTERS_OFF = ("CI", "GITHUB_ACTIONS", "ORT_DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS")
"""Without these of whoever runs the tests, a library reports as it does for a user."""


def strays(arguments: list[str], cwd: Path, work: Path) -> list[str]:
    """The files a command leaves in a fresh home and TMPDIR, and the addresses it asks for."""
    home, temporary, trace = work / "home", work / "tmp", work / "trace"
    home.mkdir(parents=True)
    temporary.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV", "HF_"))}
    environment = {k: v for k, v in kept.items() if k not in REPORTERS_OFF}
    environment |= {"HOME": str(home), "TMPDIR": str(temporary), "XDG_CACHE_HOME": f"{home}/.cache"}
    watched = [STRACE, "-f", "-qq", "-e", "trace=connect,sendto,sendmmsg", "-o", str(trace)]
    command = [*(watched if STRACE else []), sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr
    files = [str(p.relative_to(work)) for f in (home, temporary) for p in f.rglob("*")]
    calls = trace.read_text().splitlines() if STRACE else []
    return [f for f in files if (work / f).is_file()] + [c for c in calls if "AF_INET" in c]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("silence")) / "bundle"


def test_predict_is_silent(bundle: Path, tmp_path: Path) -> None:
    arguments = ["-m", "optimizer.cli", "predict", str(bundle), "good film"]
    assert strays(arguments, ROOT, tmp_path / "w") == []


@pytest.mark.parametrize(
    "arguments", [("predict", "good film"), ("bench", "--iterations=5", "--sequence=8"), ("check",)]
)
def test_the_harness_in_a_bundle_is_silent(
    arguments: tuple[str, ...], bundle: Path, tmp_path: Path
) -> None:
    assert strays(["-m", "harness", *arguments], bundle, tmp_path / "w") == []


def test_onnxruntime_genai_is_silent(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai is not installed")
    decoder = generation_bundle.make(tmp_path, "shared")
    name = "model/onnxruntime-cpu/genai_config.json"
    if not (decoder / name).exists():
        pytest.skip("this bundle has no folder for it")
    arguments = ["-m", "harness", "predict", "good", "--genai", "--max-new-tokens", "2"]
    assert strays(arguments, decoder, tmp_path / "w") == []


@pytest.mark.slow
def test_a_run_is_silent(tiny_bert: Path, tmp_path: Path) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    folders = ["--store", str(tmp_path / "store"), "--artifacts", str(tmp_path / "artifacts")]
    arguments = ["-m", "optimizer.cli", "run", str(recipe), *folders]
    assert strays(arguments, ROOT, tmp_path / "w") == []


def test_a_library_left_to_itself_is_noticed(tmp_path: Path) -> None:
    """The test above can fail: ONNX Runtime alone leaves its device id."""
    reports = strays(["-c", "import onnxruntime"], ROOT, tmp_path / "w")
    from importlib.metadata import version

    if tuple(map(int, version("onnxruntime").split(".")[:2])) < (1, 29):
        pytest.skip("this ONNX Runtime reports nothing")
    assert any("deviceid" in r for r in reports)
