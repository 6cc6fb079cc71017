"""`optimize load` on a bundle's own server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from tests.package.bundles import image_bundle, small_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle"


def test_a_bundle_is_served_asked_and_every_answer_compared(bundle: Path) -> None:
    options = ["--rate", "40", "--seconds", "1", "--price-per-hour", "0.36", "--json"]
    result = CliRunner().invoke(main, ["load", str(bundle), *options])
    document = json.loads(result.stdout)
    (run,) = document["runs"]
    assert run["answered"] == run["sent"] > 10
    assert document["requests"] == "embeddings"
    assert document["cost_per_1000"] == pytest.approx(0.36 / 3600 / 40 * 1000)
    assert result.exit_code == 0


def test_a_bundle_that_is_none_is_refused_with_what_its_server_says(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["load", str(tmp_path / "none"), "--rate", "1"])
    assert result.exit_code == 2
    assert "the server ended with 2" in result.stderr
    assert "manifest.json" in result.stderr


def test_without_a_rate_there_must_be_an_objective_to_search_for(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["load", str(tmp_path)])
    assert result.exit_code == 2
    assert "--p99-ms 50" in result.stderr


def test_a_model_of_images_is_asked_with_images_over_both_protocols(tmp_path: Path) -> None:
    bundle = image_bundle.make(tmp_path)
    for options in ([], ["--grpc"]):
        words = ["load", str(bundle), "--rate", "20", "--seconds", "1", "--json", *options]
        result = CliRunner().invoke(main, words)
        document = json.loads(result.stdout)
        (run,) = document["runs"]
        assert (document["inputs"], run["answered"], run["wrong"]) == ("image", run["sent"], 0)
        assert document["url"].startswith("grpc" if options else "http")


def test_a_server_over_grpc_has_no_list_of_models() -> None:
    result = CliRunner().invoke(main, ["load", "grpc://127.0.0.1:1", "--rate", "1"])
    assert result.exit_code == 2
    assert "--model" in result.stderr


def test_a_model_is_named_over_grpc_alone() -> None:
    words = ["load", "http://127.0.0.1:1", "--rate", "1", "--model", "m"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert "--model is for gRPC" in result.stderr
