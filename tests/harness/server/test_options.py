"""Settings of a server from the command line, a file, the recipe, or the defaults."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.errors import InputError, MachineError
from optimizer.harness.inputs.lines import read_lines
from optimizer.harness.server.caches import pairs
from optimizer.harness.server.options import Settings, check_installed, choose_settings
from tests.harness.server.serving import Client, on_server, parsed
from tests.package.bundles import small_bundle

RECIPE = {"recipe": {"serve": {"rows": 2, "delay_ms": 3, "max_wait": None}}}


def file_of(folder: Path, document: Any) -> str:
    file = folder / "serve.json"
    file.write_text(json.dumps(document))
    return str(file)


def test_without_any_the_defaults_hold() -> None:
    assert choose_settings({"recipe": {}}, parsed()) == Settings()


def test_the_command_line_comes_before_the_file_and_that_before_the_recipe(tmp_path: Path) -> None:
    file = file_of(tmp_path, {"serve": {"rows": 4, "max_wait": 0.5}})
    settings = choose_settings(RECIPE, parsed("--settings", file, "--rows", "16"))
    assert settings == Settings(rows=16, delay_ms=3, max_wait=0.5)


def test_zero_on_the_command_line_is_a_value() -> None:
    assert choose_settings(RECIPE, parsed("--delay-ms", "0")).delay_ms == 0


@pytest.mark.parametrize(
    ("document", "where"),
    [
        ({"serve": {"rows": 0}}, "rows"),
        ({"serve": {"rows": True}}, "rows"),
        ({"serve": {"rowz": 4}}, "rowz"),
        ({"rows": 4}, "serve"),
        ([], "serve.json"),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_its_field(
    document: Any, where: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=where):
        choose_settings(RECIPE, parsed("--settings", file_of(tmp_path, document)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.json"):
        choose_settings(RECIPE, parsed("--settings", str(tmp_path / "none.json")))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes
    for reads in (
        lambda file: choose_settings(RECIPE, parsed("--settings", str(file))),
        pairs.read,
        read_lines,
    ):
        with pytest.raises(InputError, match="not a regular file"):
            reads(tmp_path / "pipe")


def test_a_server_takes_the_settings_of_its_bundle(tmp_path: Path) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    small_bundle.edited(bundle, lambda m: m["recipe"].update({"serve": {"rows": 3, "delay_ms": 2}}))

    async def test(client: Client) -> None:
        (line,) = [line for line in client.lines if line["event"] == "warmed_up"]
        assert (line["rows"], line["delay_ms"]) == (3, 2)

    on_server(bundle, test)


def test_a_package_that_serve_needs_and_that_is_missing_is_named() -> None:
    check_installed("serve", {"json": "json"})
    with pytest.raises(MachineError, match="pip install nothing grpcio"):
        check_installed("serve", {"json": "json", "nothing": "nothing", "no.package": "grpcio"})
