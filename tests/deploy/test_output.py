"""The output folder of a deployment: complete, of an intact bundle, never over foreign files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.deploy.conftest import deployed, run


def test_a_deployment_holds_every_file_of_the_bundle_and_says_of_which(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "a" / "triton"
    document = deployed(bundle, "--to", "triton", "--out", out)
    manifest = json.loads((bundle / "manifest.json").read_text())
    copy = out / "models" / "tiny" / "1" / "bundle"
    names = {p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()}
    assert names == {*manifest["files"], "manifest.json"}
    assert all((copy / n).read_bytes() == (bundle / n).read_bytes() for n in names)
    assert document["digest"] == manifest["digest"]
    kept = json.loads((out / "deploy.json").read_text())
    assert {"exit_code": 0, "out": str(out), **kept} == document


def test_an_earlier_deployment_is_replaced_and_nothing_else_is(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    deployed(bundle, "--to", "triton", "--out", out)
    (out / "left").touch()
    deployed(bundle, "--to", "triton", "--out", out)
    assert not (out / "left").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    other = tmp_path / "other"
    other.mkdir()
    result = run(bundle, "--to", "triton", "--out", other)
    assert (result.exit_code, "so it was not written by this command" in result.stderr) == (2, True)
    assert list(other.iterdir()) == []


def test_a_damaged_bundle_is_not_deployed(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    (copy / "model/onnxruntime-cpu/model.onnx").write_bytes(b"x")
    result = run(copy, "--to", "triton", "--out", tmp_path / "out")
    assert (result.exit_code, "model.onnx" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "trito"], "triton"),
        (["--to", "nomad"], "Accepted: triton"),
        (["--to", "triton", "--", "--port", "1"], "--port was given"),
        (["--to", "triton", "--", "--timeout", "9"], "--timeout configures our server"),
        (["--to", "triton", "--", "--rowz", "9"], "optimize serve BUNDLE --help"),
    ],
)
def test_what_cannot_be_written_is_refused_with_what_can(
    words: list[str], message: str, bundle: Path, tmp_path: Path
) -> None:
    result = run(bundle, "--out", tmp_path / "out", *words)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "out").exists()
