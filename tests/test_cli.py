"""The command line: exit codes, one JSON document on stdout, messages without tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize("command", sorted(main.commands))
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    result = optimize(command, "--help")
    assert result.exit_code == 0
    assert (
        f"optimize {command}" in result.output or f"optimize {'--json '}{command}" in result.output
    )


def test_a_good_recipe_checks_with_exit_0(recipe: Path) -> None:
    result = optimize("check", str(recipe))
    assert (result.exit_code, "fine" in result.output) == (0, True)


def test_a_recipe_path_alone_means_run() -> None:
    result = optimize("missing.yaml")
    assert result.exit_code == 2
    assert "missing.yaml: cannot be read" in result.stderr


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


def test_debug_raises_the_error_itself(recipe: Path) -> None:
    from optimizer.errors import RecipeError

    result = optimize("check", str(recipe), "--debug", "--set", "quantize.metod=rtn")
    assert isinstance(result.exception, RecipeError)


def test_an_unexpected_failure_is_exit_1_and_is_called_our_bug(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from optimizer import targets

    def broken(_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(targets, "check", broken)
    result = optimize("check", str(recipe))
    assert result.exit_code == 1
    assert "unexpected KeyError" in result.stderr
    assert "--debug" in result.stderr


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
    from optimizer import targets
    from optimizer.harness.errors import MachineError

    def refused(_: object) -> None:
        raise MachineError("no such device", where="cuda")

    monkeypatch.setattr(targets, "check", refused)
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
