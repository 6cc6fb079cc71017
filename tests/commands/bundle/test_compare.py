"""`optimize compare` and `diff`: what differs between bundles, wherever they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.commands.bundle import look
from optimizer.publish.push import push
from optimizer.publish.registries.layout import Layout
from tests.package.bundles import small_bundle
from tests.publish.environments.test_environments import quality, version
from tests.publish.servers import oci_server


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two versions, the second of which is worse by a tenth."""
    bundle = small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle"
    return version(bundle, "1", quality(360)), version(bundle, "2", quality(320))


def test_a_published_bundle_differs_as_its_folder_does_and_no_model_is_fetched(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    with oci_server.serving() as server:
        push(two[0], server.client(), "1")
        push(two[1], Layout(tmp_path / "layout"), "2")
        server.log.clear()
        at = f"oci://{server.host}/models/tiny:1", f"oci-layout:{tmp_path / 'layout'}:2"
        published = json.loads(optimize("diff", "--json", *at).stdout)
        fetched = {path.rpartition("/")[2] for method, path, *_ in server.log if method == "GET"}
    assert len(fetched) == 3  # the tag, manifest.json, report.json
    folders = json.loads(optimize("--json", "compare", *two).stdout)
    for document, names in ((published, at), (folders, two)):
        assert [document[side].pop("bundle") for side in "ab"] == [str(n) for n in names]
    assert published == folders
    assert folders["a"]["onnxruntime-cpu: accuracy"] == 0.9


def test_whether_the_second_is_worse_is_said_by_the_paired_test(two: tuple[Path, Path]) -> None:
    forth = optimize("diff", *two).stdout
    back = optimize("diff", *reversed(two)).stdout
    assert "- onnxruntime-cpu, accuracy: worse by 0.1000 (0.0762 to 0.1284;" in forth
    assert "- onnxruntime-cpu, accuracy: better by 0.1000 (0.0762 to 0.1284;" in back


SLOW = {"p50": 12.0, "p50_interval": [11.0, 13.0]}
FAST = {"p50": 9.0, "p50_interval": [8.9, 9.1]}


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(SLOW, FAST, "faster, 9 ms against 12 ms"), (FAST, SLOW, "slower, 12 ms against 9 ms"),
     (FAST, {**FAST, "p50_interval": [8.0, 10.0]}, "cannot be told: 9 ms against 9 ms"),
     (FAST, {**SLOW, "p50_interval": [None, None]}, "cannot be told: too few runs")],
)  # fmt: skip
def test_a_time_is_told_apart_by_its_intervals(
    before: dict[str, Any], after: dict[str, Any], told: str
) -> None:
    assert look.faster(before, after, ["a processor", "a processor"]).startswith(told)
    elsewhere = look.faster(before, after, ["a processor", "another"])
    assert elsewhere.startswith("cannot be told: timed on a processor and on another")


def test_a_decoder_is_compared_by_its_next_token(two: tuple[Path, Path]) -> None:
    def timed(folder: Path, times: dict[str, Any]) -> look.Description:
        cell = {"batch": 1, "prompt": 64, "systems": {"candidate": {"inter_token": times}}}
        one = look.describe(folder)
        return replace(one, reports=[{**one.reports[0], "speed": {"cells": [cell]}}])

    (sentence,) = look.compare(timed(two[0], SLOW), timed(two[1], FAST))["speed"]
    assert "p50 at batch 1 x 64 tokens of prompt, next token: faster, 9 ms" in sentence


def test_a_table_is_as_wide_as_the_terminal(two: tuple[Path, Path]) -> None:
    document = look.compare(*map(look.describe, two))
    document["recipe"] = {"quantize.layers": [["encoder.layer.0"] * 9, None]}
    for width in (60, 120):
        lines = look.compare_text(document, width).splitlines()
        assert max(map(len, lines)) <= width


def test_a_tag_that_is_not_there_names_those_that_are(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    push(two[0], Layout(tmp_path / "layout"), "1")
    result = optimize("diff", two[0], f"oci-layout:{tmp_path / 'layout'}:7")
    assert (result.exit_code, "Accepted: 1" in result.stderr) == (2, True)
