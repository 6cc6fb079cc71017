"""Compose: published ports, scraped metrics, and a dashboard of metrics that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.deploy.dashboard import WINDOW
from optimizer.harness.commands.command_line import _parser as parser
from optimizer.harness.process.niceness import IDLE
from tests.deploy.conftest import deployed
from tests.harness.server.serving import Client, on_server

GIVEN = ("--memory-mib", "300", "--cpu", "2")
FUNCTIONS = {"sum", "rate", "by", "le", "reason", "status", "model", "histogram_quantile"}
PROMTOOL = shutil.which("promtool")


@pytest.fixture(scope="module")
def out(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose") / "out"
    deployed(bundle, "--to", "compose", "--out", folder, *GIVEN)
    return folder


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def test_everything_is_published_on_the_loopback_only(out: Path) -> None:
    services = read(out / "compose.yaml")["services"]
    assert set(services) == {"server", "prometheus", "grafana"}
    published = [port for service in services.values() for port in service["ports"]]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_prometheus_scrapes_the_server_and_grafana_asks_prometheus(out: Path) -> None:
    services = read(out / "compose.yaml")["services"]
    args = parser("serve").parse_args(services["server"]["command"])
    assert args.host == "0.0.0.0"
    assert services["server"]["ports"] == [f"127.0.0.1:{args.port}:{args.port}"]
    (job,) = read(out / "prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"server:{args.port}"]}]
    (datasource,) = read(out / "grafana/provisioning/datasources/prometheus.yml")["datasources"]
    name, _, port = datasource["url"].removeprefix("http://").partition(":")
    assert services[name]["ports"] == [f"127.0.0.1:{port}:{port}"]
    board = json.loads((out / "grafana/dashboards/server.json").read_text())
    uids = {t["datasource"]["uid"] for p in board["panels"] for t in p["targets"]}
    chosen, _ = board["templating"]["list"]
    assert uids == {f"${{{chosen['name']}}}"}
    assert chosen["current"]["value"] == datasource["uid"]
    (provider,) = read(out / "grafana/provisioning/dashboards/files.yml")["providers"]
    mounts = [v.split(":") for s in services.values() for v in s.get("volumes", ())]
    assert provider["options"]["path"] in {inside for _, inside, _ in mounts}
    assert all((out / outside).exists() and mode == "ro" for outside, _, mode in mounts)


@pytest.mark.parametrize(
    ("given", "nice"),
    [(["--cpu", 2], IDLE), (["--cpu", 1], 10), (["--cpu", 2, "--", "--model-nice", "0"], 0)],
)
def test_in_a_container_the_model_gives_way_unless_the_user_says_otherwise(
    bundle: Path, tmp_path: Path, given: list[str], nice: int
) -> None:
    where = "--to", "compose", "--out", tmp_path / "out", "--memory-mib", 300
    deployed(bundle, *where, *given)
    server = read(tmp_path / "out/compose.yaml")["services"]["server"]
    assert parser("serve").parse_args(server["command"]).model_nice == nice


def test_the_server_may_end_before_it_is_ended(out: Path) -> None:
    server = read(out / "compose.yaml")["services"]["server"]
    args = parser("serve").parse_args(server["command"])
    assert int(server["stop_grace_period"].removesuffix("s")) > args.timeout + args.client_seconds


def queried(board: Path) -> set[str]:
    """Return the metric names in a dashboard's queries."""
    panels = json.loads(board.read_text())["panels"]
    queries = [t["expr"].replace(WINDOW, "") for p in panels for t in p["targets"]]
    assert len(queries) >= len(panels) > 0
    return {n for q in queries for n in re.findall(r"[a-zA-Z_][\w:]*", q)} - FUNCTIONS


def counted(bundle: Path) -> set[str]:
    """Return the metric names of a live server of the bundle after one request."""
    lines: list[str] = []

    async def ask(client: Client) -> None:
        lines.extend((await client.ask("GET", "/metrics")).body.decode().splitlines())

    on_server(bundle, ask)
    return {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}


def test_every_query_is_of_metrics_that_the_server_says(
    out: Path, bundle: Path, decoder_bundle: Path, tmp_path: Path
) -> None:
    deployed(
        decoder_bundle, "--to", "compose", "--out", tmp_path / "out", *GIVEN, "--drain-seconds", "9"
    )
    for folder, served in ((out, bundle), (tmp_path / "out", decoder_bundle)):
        names = queried(folder / "grafana/dashboards/server.json")
        assert names - counted(served) == set()
        assert any(n.startswith("vllm:") for n in names) == (served is decoder_bundle)


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on the PATH")
@pytest.mark.slow
def test_prometheus_accepts_its_configuration(out: Path) -> None:
    command = [str(PROMTOOL), "check", "config", str(out / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
