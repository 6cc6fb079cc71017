"""A search for settings, from the bundle to a recipe's section and a server's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.harness.runtimes.ort.run import cores
from optimizer.harness.server.options import Settings, choose_settings
from optimizer.load_test import tuned_server
from optimizer.load_test.highest_rate import PRECISION, HighestRate
from optimizer.load_test.measure import Objectives, Schedule
from optimizer.load_test.tuned_server import ServerUnderTest, list_arguments
from optimizer.recipe.serving import Serve
from tests.harness.server.serving import parsed
from tests.package.bundles import small_bundle


class Server(ServerUnderTest):
    """Best with 16 rows; under overload answers keep 100 ms where requests wait for 20 ms at most.
    met: True where some rate meets the objectives."""

    met, undecided = True, False

    def __init__(self) -> None:
        super().__init__(
            Path(), [], Schedule(1.0), Objectives({"latency": 100.0}), new_tokens=1, patience=1.0
        )
        self.full = 0.01

    def start(self) -> dict[str, Any]:
        return {"rows": 8, "delay_ms": 0, "workers": 1}

    def highest(self, settings: Any) -> HighestRate:
        met = 10.0 * min(settings["rows"], 16) - settings["delay_ms"]
        return (
            HighestRate(met, PRECISION * met)
            if self.met
            else HighestRate(None, 1.0, self.undecided)
        )

    def overload(self, settings: Any, rate: float) -> Any:
        assert rate == 3 * 160
        wait = settings["max_wait"]
        return "pass" if wait is not None and wait < 0.025 else "fail"


def test_what_is_found_is_a_section_of_a_recipe_and_a_settings_file(tmp_path: Path) -> None:
    document = tuned_server.tune(Server())
    expected = {"rows": 16, "delay_ms": 0, "workers": 1, "max_wait": 0.0225}
    assert document["serve"] == expected
    text = tuned_server.format_document(document)
    section = yaml.safe_load(text[text.index("serve:") :])["serve"]
    assert Serve(**section).model_dump(exclude_none=True) == document["serve"]
    file = tmp_path / "serve.json"
    file.write_text(json.dumps({"serve": document["serve"]}))
    by_file = choose_settings({"recipe": {}}, parsed("--settings", str(file)))
    by_option = choose_settings({"recipe": {}}, parsed(*list_arguments(document["serve"])))
    assert by_file == by_option == Settings(rows=16, max_wait=0.0225)


@pytest.mark.parametrize("undecided", [False, True])
def test_where_no_rate_meets_the_objectives_nothing_is_found(undecided: bool) -> None:
    server = Server()
    server.met, server.undecided = False, undecided
    document = tuned_server.tune(server)
    assert document["verdict"] == ("inconclusive" if undecided else "fail")
    assert "serve:" not in tuned_server.format_document(document)


def test_without_an_objective_there_is_nothing_to_tune_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["tune-serving", str(tmp_path)])
    assert result.exit_code == 2
    assert "--p99-ms 50" in result.stderr


def test_a_bundle_is_served_with_the_settings_that_are_tried(tmp_path: Path) -> None:
    bundle = small_bundle.make(tmp_path) / "bundle"
    server = ServerUnderTest(
        bundle, [], Schedule(0.5), Objectives({"latency": 1e-6}), new_tokens=1, patience=20.0
    )
    assert server.start() == {"rows": 8, "delay_ms": 0, "workers": 1}
    assert server.most_workers == cores()
    assert server.overload({"rows": 2, "delay_ms": 0, "max_wait": 0.5}, 20.0) == "fail"
    assert server.full > 0


@pytest.mark.slow
def test_the_command_finds_settings_that_a_server_takes(tmp_path: Path) -> None:
    bundle, out = small_bundle.make(tmp_path) / "bundle", tmp_path / "serve.json"
    words = ["--seconds", "3", "--p99-ms", "200", "--out", str(out), "--json"]
    result = CliRunner().invoke(main, ["tune-serving", str(bundle), *words])
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    settings = choose_settings({"recipe": {}}, parsed("--settings", str(out)))
    assert settings.rows == document["serve"]["rows"]
