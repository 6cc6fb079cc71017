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
from optimizer.publish.registries.layout import OciLayout
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
        push(two[1], OciLayout(tmp_path / "layout"), "2")
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


def timed(ratio: list[float | None], p50: float = 9.0, to: str = "float") -> dict[str, Any]:
    """Return a cell whose median time and ratio to float are these."""
    found = {"to": to, "median": sum(r or 0 for r in ratio) / 2, "interval": ratio}
    systems = {"candidate": {"end_to_end": {"p50": p50}}}
    return {"batch": 1, "sequence": 64, "ratio": found, "systems": systems}


SLOW, FAST = timed([0.7, 0.8], 12.0), timed([0.5, 0.6])


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(SLOW, FAST, "faster: 0.55 (0.5 to 0.6) of the time of float against 0.75"),
     (FAST, SLOW, "slower: 0.75"),
     (FAST, timed([0.55, 0.75]), "cannot be told: 0.65"),
     (FAST, timed([None, None]), "cannot be told: too few runs"),
     (FAST, timed([0.3, 0.4], to="bf16"), "cannot be told: compared with bf16 and with float"),
     (FAST, {**SLOW, "ratio": None}, "cannot be told: without a float baseline")],
)  # fmt: skip
def test_times_are_compared_by_their_ratios_to_float(
    before: dict[str, Any], after: dict[str, Any], verdict: str
) -> None:
    assert look.judge_speed(before, after).startswith(verdict)


def test_the_same_bundle_on_a_busier_machine_is_not_slower() -> None:
    """Both systems of a run took three times as long: the ratio has not changed."""
    assert look.judge_speed(FAST, timed([0.5, 0.6], 27.0)).startswith("cannot be told: 0.55")


@pytest.mark.parametrize(
    ("change", "why"),
    [({"speed": {"machine": {"cpu": "another"}, "cells": [FAST]}}, "timed on None and on another"),
     ({"task": "text-classification"}, "task text-classification, and sentence-embedding")],
)  # fmt: skip
def test_times_of_another_processor_or_model_are_not_compared(
    two: tuple[Path, Path], change: dict[str, Any], why: str
) -> None:
    one, other = map(look.describe, two)
    one = replace(one, reports=[{**one.reports[0], "speed": {"cells": [SLOW]}}])
    speed = change.get("speed", {"cells": [FAST]})
    task = change.get("task", other.manifest["contract"]["task"])
    manifest = {**other.manifest, "contract": {**other.manifest["contract"], "task": task}}
    other = replace(other, manifest=manifest, reports=[{**other.reports[0], "speed": speed}])
    (sentence,) = look.compare(one, other)["speed"]
    assert f"cannot be told: {why}" in sentence


def test_a_decoder_is_compared_by_its_next_token(two: tuple[Path, Path]) -> None:
    def described(folder: Path, cell: dict[str, Any]) -> look.Description:
        ratio = {"to": "float", "inter_token": cell["ratio"]}
        systems = {"candidate": {"inter_token": cell["systems"]["candidate"]["end_to_end"]}}
        cell = {"batch": 1, "prompt": 64, "ratio": ratio, "systems": systems}
        one = look.describe(folder)
        return replace(one, reports=[{**one.reports[0], "speed": {"cells": [cell]}}])

    (sentence,) = look.compare(described(two[0], SLOW), described(two[1], FAST))["speed"]
    assert "time at batch 1 x 64 tokens of prompt, next token: faster: 0.55" in sentence
    assert "p50 9 ms against 12 ms" in sentence


def test_a_table_is_as_wide_as_the_terminal(two: tuple[Path, Path]) -> None:
    document = look.compare(*map(look.describe, two))
    document["recipe"] = {"quantize.layers": [["encoder.layer.0"] * 9, None]}
    for width in (60, 120):
        lines = look.compare_text(document, width).splitlines()
        assert max(map(len, lines)) <= width


def test_a_tag_that_is_not_there_names_those_that_are(
    two: tuple[Path, Path], tmp_path: Path
) -> None:
    push(two[0], OciLayout(tmp_path / "layout"), "1")
    result = optimize("diff", two[0], f"oci-layout:{tmp_path / 'layout'}:7")
    assert (result.exit_code, "Accepted: 1" in result.stderr) == (2, True)
