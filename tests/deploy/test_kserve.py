"""A ServingRuntime and the InferenceService that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from optimizer.harness.commands.command_line import _parser as parser
from optimizer.harness.server.http.request import OPEN
from tests.deploy.conftest import deployed, run

GIVEN = ("--image", "tiny:1", "--endpoint-seconds", "5", "--memory-mib", "300", "--cpu", "2")


def test_the_service_runs_on_the_runtime_which_is_the_bundles_server(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--replicas", "2", "--max-replicas", "4", "--cpu-percent", "60")
    deployed(bundle, "--to", "kserve", "--out", out, *GIVEN, *words)
    runtime, service = yaml.safe_load_all((out / "kserve.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    args = parser("serve").parse_args(container["args"])
    assert (container["name"], container["image"]) == ("kserve-container", "tiny:1")
    assert container["ports"] == [{"name": "http1", "containerPort": args.port, "protocol": "TCP"}]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["path"].strip("/") in OPEN
    predictor = service["spec"]["predictor"]
    model = predictor["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["spec"]["supportedModelFormats"][0]["name"]
    assert [model["protocolVersion"]] == runtime["spec"]["protocolVersions"] == ["v2"]
    assert "storageUri" not in model  # the image holds it
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (2, 4)
    assert (predictor["scaleMetric"], predictor["scaleTarget"]) == ("cpu", 60)
    assert predictor["terminationGracePeriodSeconds"] > 5 + args.timeout + args.client_seconds
    mounts = {m["name"] for m in container["volumeMounts"]}
    assert mounts == {v["name"] for v in runtime["spec"]["volumes"]}


def test_kedas_signal_is_refused_as_kserve_has_its_own(bundle: Path, tmp_path: Path) -> None:
    words = ("--waiting", "4", "--prometheus", "http://prometheus:9090", "--max-replicas", "3")
    result = run(bundle, "--to", "kserve", "--out", tmp_path / "out", *GIVEN, *words)
    assert (result.exit_code, "--prometheus does not apply to --to kserve" in result.stderr) == (
        2,
        True,
    )


@pytest.mark.parametrize("needed", ["--image", "--endpoint-seconds"])
def test_what_is_not_known_must_be_said(needed: str, bundle: Path, tmp_path: Path) -> None:
    at = GIVEN.index(needed)
    words = (*GIVEN[:at], *GIVEN[at + 2 :])
    result = run(bundle, "--to", "kserve", "--out", tmp_path / "out", *words)
    assert (result.exit_code, f"{needed} is required by --to kserve" in result.stderr) == (2, True)
