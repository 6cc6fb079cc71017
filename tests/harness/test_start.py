"""python -m harness in a bundle: its own files are compared before one of them is imported."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from optimizer.harness import describe_damage
from tests.package.bundles import small_bundle


def start(bundle: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return small_bundle.python(bundle, "-B", *arguments)


def test_any_changed_missing_or_extra_source_is_named(bundle: Path) -> None:
    folder = bundle / "harness"
    assert describe_damage(str(folder)) == ""
    sources = {path: path.read_bytes() for path in sorted(folder.rglob("*.py"))}
    assert len(sources) > 40
    for part in ([*sources][::2], [*sources][1::2]):  # the other half is intact, and is not named
        names = [path.relative_to(bundle).as_posix() for path in part]
        for path in part:
            good = sources[path]
            path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]) if good else b"#")
        damaged = [f"{name} is damaged: its digest is not the manifest's" for name in names]
        assert describe_damage(str(folder)) == ", ".join(damaged)
        for path in part:
            path.unlink()
        assert describe_damage(str(folder)) == ", ".join(f"{n} is missing" for n in sorted(names))
        for path in part:
            path.write_bytes(sources[path])
    (folder / "tasks" / "numpy.py").write_text("")
    assert describe_damage(str(folder)) == "harness/tasks/numpy.py is not in the manifest"


@pytest.mark.parametrize(
    "name",
    [
        "__main__.py",
        "commands/command_line.py",
        "errors.py",
        "bundle/manifest.py",
        "inputs/text.py",
    ],
)
def test_a_source_that_python_cannot_read_is_a_sentence_and_no_traceback(
    name: str, bundle: Path
) -> None:
    (bundle / "harness" / name).write_text("def (")
    done = start(bundle, "-m", "harness", "check")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"harness/{name} is damaged" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_sentence_is_a_document_with_json(bundle: Path) -> None:
    (bundle / "harness" / "bundle" / "fit.py").unlink()
    done = start(bundle, "-m", "harness", "predict", "good", "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["exit_code"], document["error"]) == (2, 2, "BundleError")
    assert "harness/bundle/fit.py is missing" in document["found"]


@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_without_the_file_that_looks_nothing_starts(how: str, bundle: Path) -> None:
    path = bundle / "harness" / "__init__.py"
    path.unlink()
    if how == "emptied":
        path.touch()
    done = start(bundle, "-m", "harness", "check")
    assert done.returncode == 2
    assert done.stderr == "harness/__init__.py is missing or damaged. Get the bundle again.\n"


def test_a_broken_manifest_is_a_sentence(bundle: Path) -> None:
    (bundle / "manifest.json").write_text('{"files": [1]}')
    done = start(bundle, "-m", "harness", "check")
    assert done.returncode == 2
    assert "manifest.json cannot be read" in done.stderr
    assert done.stderr.count("\n") == 1


def test_bytecode_that_another_start_is_about_to_remove_is_no_damage(bundle: Path) -> None:
    """Python writes that of __init__.py before the file can say that it shall not; under a name of
    its own first."""
    folder = bundle / "harness" / "__pycache__"
    folder.mkdir()
    (folder / "__init__.cpython-399.pyc.140351").touch()
    done = start(bundle, "-m", "harness", "predict", "good")
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "fit.cpython-399.pyc").touch()
    assert start(bundle, "-m", "harness", "predict", "good").returncode == 2


@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_manifest_that_is_no_plain_file_is_not_opened(kind: str, bundle: Path) -> None:
    path = bundle / "manifest.json"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)  # reading it waits for ever
    elif kind == "link":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    done = start(bundle, "-m", "harness", "check")
    assert done.returncode == 2
    assert "manifest.json cannot be read" in done.stderr


def test_a_program_that_imports_a_damaged_harness_gets_an_import_error(bundle: Path) -> None:
    (bundle / "harness" / "bundle" / "fit.py").write_text("")
    code = "try:\n import harness.bundle.bundle\nexcept ImportError as e:\n print(e)"
    assert "harness/bundle/fit.py is damaged" in start(bundle, "-c", code).stdout


def test_a_stray_file_in_the_bundle_is_not_taken_for_a_package(bundle: Path) -> None:
    (bundle / "numpy.py").write_text("raise SystemExit('stray')")
    (bundle / "json.py").write_text("raise SystemExit('stray')")
    done = start(bundle, "-m", "harness", "check", "--json")
    assert json.loads(done.stdout)["unlisted"] == ["json.py", "numpy.py"]
