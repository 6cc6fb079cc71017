"""`optimize shapes` on logs of a server, traces, and /metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.errors import DataError
from optimizer.load_test import arrivals
from optimizer.traffic import buckets, recommended, requests
from tests.harness.server import serving
from tests.package.bundles import small_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["shapes", *map(str, arguments)])


def write(file: Path, entries: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return file


def test_a_servers_log_and_its_metrics_name_the_same_rows(bundle: Path) -> None:
    texts, read = ["good film", "a very good film and a bad one", "good film"], {}

    async def test(client: serving.Client) -> None:
        assert (await client.infer(texts)).status == 200
        assert (await client.infer(texts[:1])).status == 200
        metrics = (await client.ask("GET", "/metrics")).body.decode()
        log = "".join(json.dumps(line) + "\n" for line in client.lines)
        read.update(log=requests.read(log, "log"), metrics=requests.read(metrics, "metrics"))

    serving.on_server(bundle, test)
    assert read["log"].lengths == read["metrics"].lengths
    assert sorted(read["log"].lengths.values()) == [1, 3]
    assert sum(n * rows for n, rows in read["log"].batches.items()) == 4
    assert read["log"].model == read["metrics"].model == "tiny"


def test_the_fragment_is_yaml_with_the_busiest_rate_and_a_recording(tmp_path: Path) -> None:
    instants = [*range(0, 600, 10), *(600 + i / 4 for i in range(240))]  # 0.1 then 4 a second
    entries = [{"time": t, "lengths": [8, 40], "ms": 1 + i % 10} for i, t in enumerate(instants)]
    recording = tmp_path / "arrivals.txt"
    done = run(write(tmp_path / "trace.jsonl", entries), "--recording", recording)
    assert done.exit_code == 0, done.output
    fragment = yaml.safe_load(done.stdout)
    assert fragment["validate"]["latency"] == {"batch": [2], "sequence": [8, 40]}
    assert fragment["slo"] == {"rate": 4, "p99_ms": 10, "seconds": 101}
    assert arrivals.read(recording) == instants


def test_of_two_requests_the_rate_is_theirs_and_the_percentile_the_slower() -> None:
    text = '{"time": 1, "length": 9, "ms": 1}\n{"time": 3, "length": 9, "ms": 100.49}\n'
    traffic = requests.read(text, "trace")
    assert recommended.measure_rates(traffic.instants) == {"mean": 0.5, "busiest": 0.5, "window": 2}
    choices = buckets.choose(traffic.lengths, float, 1, 9)
    slo = recommended.build_document(traffic, choices, "", "")["slo"]
    assert (slo["rate"], slo["p99_ms"]) == (0.5, 100.49)


@pytest.mark.parametrize("status", [429, 503, "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"])
def test_requests_that_were_refused_or_cached_count_for_the_rate_alone(
    status: object, tmp_path: Path
) -> None:
    line = {"event": "request", "time": "2026-11-27T10:00:00.500Z", "ms": 500.0, "status": 200}
    entries = [
        {**line, "lengths": [9], "batch": 4},
        {**line, "lengths": [99], "batch": 1, "cache": "hit"},
        {**line, "time": "2026-11-27T10:00:10.500Z", "status": status},
        {**line, "route": "metrics"},
        {"event": "ready"},
    ]
    file = write(tmp_path / "log", entries)
    traffic = requests.read(file.read_text() + "starting\n", str(file))
    assert (traffic.lengths, traffic.batches) == ({9: 1}, {4: 0.25})
    assert len(traffic.instants) == 3
    assert traffic.instants[2] - traffic.instants[0] == 10
    assert traffic.left_out["lines that are not JSON"] == 1


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"lengths": [12, -1]}', "length: -1"),
        ('{"lengths": 12}', "lengths: 12"),
        ('{"length": 12, "batch": 2.5}', "batch: 2.5"),
        ('{"length": 12, "time": "noon"}', "time: 'noon'"),
        ("no log at all", "no request with lengths"),
        ('{"length": 1, "model": "a"}\n{"length": 1, "model": "b"}', "several models"),
    ],
)
def test_what_is_not_a_log_is_refused_with_its_line(text: str, found: str) -> None:
    with pytest.raises(DataError, match=found):
        requests.read(text, "log")
