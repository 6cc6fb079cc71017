"""The command line: exit code, one JSON document on stdout, messages without tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from tests.conftest import write_tiny_recipe


def optimize(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path, tiny_bert: Path) -> Path:
    return write_tiny_recipe(tmp_path / "recipe", tiny_bert)


def test_help_imports_no_heavy_package() -> None:
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom optimizer.cli import main\n"
        "result = CliRunner().invoke(main, ['--help'])\n"
        "heavy = {'torch', 'transformers', 'onnx', 'onnxruntime', 'numpy', 'pydantic'}\n"
        "print(result.exit_code, sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0 []"


def test_an_exit_searches_no_object_for_garbage() -> None:
    script = (
        "import atexit, gc\nfrom optimizer.cli import main\n"
        "atexit.register(lambda: print(len(gc.get_objects()) < 10))\n"  # called last
        "main(['doctor', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "True")


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    result = optimize(command, "--help")
    assert result.exit_code == 0
    assert (
        f"optimize {command}" in result.output or f"optimize {'--json '}{command}" in result.output
    )


def test_a_good_recipe_checks_with_exit_0(recipe: Path) -> None:
    result = optimize("check", str(recipe))
    assert (result.exit_code, "no error found" in result.output) == (0, True)


@pytest.mark.parametrize("words", [["nope"], ["check", "--nope"], ["check"], ["bench", "--batch"]])
def test_a_wrong_command_line_is_a_document_too(words: list[str]) -> None:
    result = optimize("--json", *words)
    document = json.loads(result.stdout)
    assert (result.exit_code, document["exit_code"]) == (2, 2)
    assert document["found"]


def test_a_recipe_path_alone_means_run() -> None:
    result = optimize("missing.yaml")
    assert result.exit_code == 2
    assert "missing.yaml: it cannot be read" in result.stderr


def test_the_command_alone_prints_its_help() -> None:
    bare, asked = optimize(), optimize("--help")
    assert bare.output == asked.output
    assert len(bare.output.splitlines()) > 20


def test_a_misspelt_command_names_the_closest() -> None:
    result = optimize("plam")
    assert result.exit_code == 2
    assert 'did you mean "plan"?' in result.stderr


def test_a_wrong_recipe_is_exit_2_without_a_traceback(recipe: Path) -> None:
    result = optimize("check", str(recipe), "--set", "quantize.metod=rtn")
    assert result.exit_code == 2
    assert 'did you mean "method"?' in result.stderr
    assert "Traceback" not in result.stderr


def test_json_puts_one_document_on_stdout_even_for_an_error(recipe: Path) -> None:
    result = optimize("--json", "check", str(recipe), "--set", "quantize.metod=rtn")
    document = json.loads(result.stdout)
    assert document["exit_code"] == 2
    assert document["error"] == "RecipeError"


def test_json_may_be_given_after_the_command(recipe: Path) -> None:
    result = optimize("check", str(recipe), "--json")
    assert json.loads(result.stdout)["name"] == "tiny"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(recipe: Path) -> None:
    result = optimize("check", str(recipe), "--debug", "--set", "quantize.metod=rtn")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert "error: --set quantize.metod=rtn" in result.stderr


def test_an_unexpected_failure_is_exit_1_and_is_called_our_bug(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer.checks import ordered

    def broken(*_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(ordered, "CHECKS", ((broken,),))
    result = optimize("check", str(recipe))
    assert result.exit_code == 1
    assert "unexpected KeyError" in result.stderr
    assert "--debug" in result.stderr


@pytest.mark.parametrize(
    "error",
    [MemoryError(), ImportError("libtorch_cpu.so: failed to map segment from shared object")],
)
def test_a_lack_of_memory_is_the_machines_wherever_it_shows(
    error: Exception, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("optimizer.checks.read", fail)
    result = optimize("check", str(recipe))
    assert result.exit_code == 5
    assert "not enough memory" in result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v")
@pytest.mark.parametrize("command", ["check", "plan", "run"])
def test_a_limit_of_addresses_ends_in_a_sentence(command: str, recipe: Path) -> None:
    words = [sys.executable, "-m", "optimizer", command, str(recipe)]
    limited = ["bash", "-c", 'ulimit -v 500000 && exec "$@"', "bash", *words]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert (done.returncode, "ulimit -v" in done.stderr) == (5, True), done.stderr


def test_schema_is_json() -> None:
    assert json.loads(optimize("schema").stdout)["title"] == "Recipe"


def test_a_folder_that_is_no_bundle_is_refused(tmp_path: Path) -> None:
    result = optimize("inspect", str(tmp_path))
    assert result.exit_code == 2
    assert "no bundle here" in result.stderr


def test_doctor_names_every_target_and_what_is_missing() -> None:
    from optimizer.targets import TARGETS

    output = optimize("doctor").output
    assert all(runtime in output for runtime in TARGETS)


def test_an_error_of_the_harness_keeps_its_exit_code_and_message(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer.checks import ordered
    from optimizer.harness.errors import MachineError

    def refused(*_: object) -> None:
        raise MachineError("no such device", where="cuda")

    monkeypatch.setattr(ordered, "CHECKS", ((refused,),))
    result = optimize("check", str(recipe))
    assert result.exit_code == 5
    assert "error: cuda: no such device" in result.stderr


@pytest.mark.parametrize("module", ["optimizer", "optimizer.cli"])
def test_a_reader_that_has_enough_is_no_error(module: str) -> None:
    """As in `optimize schema | true`, which has ended before there is anything to read."""
    command = [sys.executable, "-m", module, "schema"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, "")


def test_check_reads_the_header_of_the_data(recipe: Path) -> None:
    text = recipe.read_text()
    assert "text: text" in text
    recipe.write_text(text.replace("text: text", "text: txet", 1))
    result = optimize("check", str(recipe))
    assert result.exit_code == 2
    assert "no column 'txet' (for text); did you mean \"text\"?" in result.stderr


def run_cli(*arguments: str, code: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, after `code`."""
    script = f"{code}\nimport sys\nfrom optimizer.cli import main\nmain(sys.argv[1:])"
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, text=True, capture_output=True, **options)


def ends_unread(*arguments: str, stream: str) -> int:
    """The exit code where nobody reads stdout, or neither that nor stderr."""
    command = [sys.executable, "-m", "optimizer", *arguments]
    read, write = os.pipe()
    os.close(read)
    errors = write if stream == "both" else subprocess.PIPE
    done = subprocess.run(command, stdout=write, stderr=errors, text=True)
    os.close(write)
    assert stream == "both" or "rror" not in done.stderr
    return done.returncode


@pytest.mark.parametrize(
    ("arguments", "stream", "code"),
    [
        (["--help"], "stdout", 0),
        (["run", "--help"], "stdout", 0),
        (["--version"], "stdout", 0),
        (["check", "missing.yaml"], "both", 2),
        (["nonsense"], "both", 2),
    ],
)
def test_the_exit_code_is_the_same_where_nobody_reads(
    arguments: list[str], stream: str, code: int
) -> None:
    assert ends_unread(*arguments, stream=stream) == code


def test_progress_that_nobody_reads_ends_the_process_as_a_shells_tool() -> None:
    code = "from optimizer.foundation.progress import say\nsay('x')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stderr=write, stdout=write)
    os.close(write)
    assert done.returncode == 128 + 13


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_place_for_temporary_files_that_is_missing_is_the_machines_fault(
    recipe: Path, command: str
) -> None:
    code = (
        "import tempfile\n"
        "def missing():\n    raise FileNotFoundError(2, 'No usable temporary directory found')\n"
        "tempfile._get_default_tempdir = missing"
    )
    done = run_cli(command, str(recipe), code=code)
    assert (done.returncode, "Set TMPDIR" in done.stderr) == (5, True)


NOBODY = (
    "import pathlib\n"
    "def nobody(*_):\n    raise RuntimeError('Could not determine home directory.')\n"
    "pathlib.Path.home = pathlib.Path.expanduser = nobody"
)


def test_a_user_without_a_home_can_ask_for_help_with_answers() -> None:
    done = run_cli("predict", "--bundle", "missing", "x", code=NOBODY)
    assert (done.returncode, "home" in done.stderr) == (2, False)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    done = run_cli("inspect", os.fsdecode(b"/tmp/\xff"))
    assert (done.returncode, r"'/tmp/\udcff' is not UTF-8" in done.stderr) == (2, True)


def test_a_terminal_without_our_signs_shows_their_numbers() -> None:
    code = """
import click
from optimizer import cli
from optimizer.foundation import progress
@click.command()
def signs(): progress.show("1 \u00d7 16")
cli.main.add_command(signs)
"""
    done = run_cli("signs", code=code, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "1 \\xd7 16\n")
