"""verify.py of a bundle finds every changed, added or removed file, and runs none of the
bundle runs first."""

import importlib.util
import os
import py_compile
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.harness.trust.verify import list_problems, name_problem, parse
from tests.package.bundles import small_bundle

MARK = "import pathlib; pathlib.Path({!r}).touch()\n"


def test_a_bundle_as_it_was_made_is_right_and_its_digest_is_printed(bundle: Path) -> None:
    done = small_bundle.python(bundle, "-I", "-S", "verify.py")
    digest, differences = list_problems(bundle)
    assert (done.returncode, done.stderr, differences) == (0, "", [])
    assert digest in done.stdout


def test_running_the_harness_leaves_no_bytecode_behind(bundle: Path) -> None:
    assert small_bundle.python(bundle, "-m", "harness", "check").returncode == 0
    code = "import harness.bundle.bundle, sys; print(sys.dont_write_bytecode)"
    assert small_bundle.python(bundle, "-c", code).stdout == "True\n"
    assert list_problems(bundle)[1] == []


CHANGES: dict[str, Callable[[Path], object]] = {
    "harness/bundle/fit.py is damaged": lambda b: (b / "harness/bundle/fit.py").write_bytes(
        (b / "harness/bundle/fit.py").read_bytes()[:-1] + b" "
    ),
    "harness/bundle/fit.py has 0 bytes": lambda b: (b / "harness/bundle/fit.py").write_text(""),
    "harness/bundle/fit.py is missing": lambda b: (b / "harness/bundle/fit.py").unlink(),
    "verify.py is missing": lambda b: (b / "verify.py").unlink(),
    "requirements.txt is a folder": lambda b: [
        (b / "requirements.txt").unlink(),
        (b / "requirements.txt").mkdir(),
    ],
    "report.html is a link": lambda b: [
        (b / "report.html").rename(b.parent / "elsewhere"),
        (b / "report.html").symlink_to(b.parent / "elsewhere"),
    ],
    "tokenizer/tokenizer.json is a link, or lies behind one": lambda b: [
        (b / "tokenizer").rename(b.parent / "other"),
        (b / "tokenizer").symlink_to(b.parent / "other"),
    ],
    "notes.txt is not in the manifest": lambda b: (b / "notes.txt").touch(),
    "a link is a link": lambda b: (b / "a link").symlink_to("harness"),
    "pipe is not a plain file": lambda b: os.mkfifo(b / "pipe"),
    "harness/bundle/__pycache__/fit.cpython-311.pyc is bytecode": lambda b: [
        (b / "harness/bundle/__pycache__").mkdir(),
        (b / "harness/bundle/__pycache__/fit.cpython-311.pyc").touch(),
    ],
    "manifest.json is damaged": lambda b: (b / "manifest.json").write_text(
        (b / "manifest.json").read_text().replace('"mean"', '"cls"')
    ),
    "manifest.json is missing": lambda b: (b / "manifest.json").unlink(),
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_change_is_found(message: str, bundle: Path) -> None:
    CHANGES[message](bundle)
    _, differences = list_problems(bundle)
    assert any(d.startswith(message) for d in differences), differences


def test_a_difference_is_exit_2_and_a_line(bundle: Path, made: Path) -> None:
    (bundle / "verify.py").write_text("raise SystemExit(0)")
    done = small_bundle.python(made, "-I", "-S", "verify.py", str(bundle))
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout.count("verify.py has 19 bytes") == done.stdout.count("\n") == 1


def unchecked(bundle: Path, name: str, mark: Path) -> None:
    """Bytecode of other code in place of a source of the harness, which Python does not compare
    with it."""
    source = bundle.parent / "evil.py"
    source.write_text((bundle / "harness" / name).read_text() + MARK.format(str(mark)))
    py_compile.compile(
        str(source),
        importlib.util.cache_from_source(str(bundle / "harness" / name)),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        doraise=True,
    )


@pytest.mark.parametrize("name", ["__init__.py", "bundle/fit.py", "commands/command_line.py"])
def test_bytecode_is_refused_before_it_runs(name: str, bundle: Path, tmp_path: Path) -> None:
    unchecked(bundle, name, tmp_path / "it ran")
    assert small_bundle.python(bundle, "-I", "-S", "verify.py").returncode == 2
    tool = [sys.executable, "-m", "optimizer.cli", "check", str(bundle)]
    done = subprocess.run(tool, capture_output=True, text=True)
    assert done.returncode == 2
    source = Path("harness", name)
    assert f"unlisted  {source.parent}/__pycache__/{source.stem}" in done.stdout
    assert not (tmp_path / "it ran").exists()
    if name == "__init__.py":  # Python itself runs it before any of ours: the documented limit
        return
    done = small_bundle.python(bundle, "-m", "harness", "check")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not in the manifest" in done.stderr
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize("name", ["json.py", "numpy.py", "__future__.py", "harness.py", "re.py"])
def test_a_module_beside_the_harness_never_runs(name: str, bundle: Path, tmp_path: Path) -> None:
    (bundle / name).write_text(MARK.format(str(tmp_path / "it ran")))
    assert small_bundle.python(bundle, "-I", "-S", "verify.py").returncode == 2
    done = small_bundle.python(bundle, "-m", "harness", "predict", "good film")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"not in the manifest: {name}" in done.stderr
    assert not (tmp_path / "it ran").exists()


@pytest.mark.parametrize(
    "name",
    ["", "/x", "../x", "a/../x", "a\\b", "C:/x", "a//b", "./a", "a/", "a\0", "a\nb", "x" * 300, 7],
)
def test_a_name_that_is_none_is_refused(name: object) -> None:
    assert name_problem(name)


@pytest.mark.parametrize("name", ["a", "model/x y/ü.onnx", "a/b/c", "..x", "a/C:x"])
def test_a_name_below_the_folder_is_one(name: str) -> None:
    assert name_problem(name) == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"NaN",
        b"1e999",
        b'{"a": 1, "a": 2}',
        b'"\\ud800"',
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
        b"9" * 5000,
    ],
)
def test_what_is_no_json_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        parse(data)


def test_a_report_may_hold_numbers_that_are_not_finite() -> None:
    assert parse(b"[Infinity, 1e999]", finite=False) == [float("inf")] * 2


def test_brackets_in_strings_are_no_nesting() -> None:
    assert parse(b'["' + b"[" * 1000 + b'", "\\"[["]') == ["[" * 1000, '"[[']
