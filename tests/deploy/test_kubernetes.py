"""The Kubernetes manifests are consistent, and their numbers follow from measurements."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.deploy import image, source
from optimizer.deploy import server as servers
from optimizer.deploy.measured import MeasuredServer, measure
from optimizer.foundation.errors import InputError
from optimizer.harness.commands.command_line import _parser as parser
from optimizer.harness.server.http.request import OPEN
from tests.deploy.conftest import deployed, run

IMAGE = "registry.example.com/tiny:1"
NEEDED = ("--image", IMAGE, "--endpoint-seconds", "5")
GIVEN = (*NEEDED, "--memory-mib", "300", "--cpu", "2")


def written(bundle: Path, out: Path, *words: str) -> dict[str, Any]:
    """Write the manifests and return {kind: document}."""
    deployed(bundle, "--to", "kubernetes", "--out", out, *GIVEN, *words)
    documents = list(yaml.safe_load_all((out / "kubernetes.yaml").read_text()))
    return {d["kind"]: d for d in documents}


def test_labels_ports_and_probes_lead_to_the_server(bundle: Path, tmp_path: Path) -> None:
    kinds = written(bundle, tmp_path / "out", "--replicas", "2")
    assert set(kinds) == {"Deployment", "Service", "PodDisruptionBudget"}
    deployment, service = kinds["Deployment"]["spec"], kinds["Service"]["spec"]
    pod = deployment["template"]
    (container,) = pod["spec"]["containers"]
    for selector in (
        deployment["selector"]["matchLabels"],
        service["selector"],
        kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    args = parser("serve").parse_args(container["args"])
    (port,) = container["ports"]
    assert args.host == "0.0.0.0"
    assert args.port == port["containerPort"]
    assert service["ports"][0]["targetPort"] == port["name"]
    for probe in ("livenessProbe", "readinessProbe"):
        get = container[probe]["httpGet"]
        assert get["port"] == args.port
        assert get["path"].strip("/") in OPEN  # a path of the server, which needs no token
    assert container["image"] == IMAGE
    assert pod["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"


def test_a_pod_is_ended_after_its_server_has_ended(bundle: Path, tmp_path: Path) -> None:
    kinds = written(bundle, tmp_path / "out", "--", "--timeout", "100", "--client-seconds", "7")
    spec = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    args = parser("serve").parse_args(container["args"])
    (wait,) = re.findall(
        r"sleep\((\d+)\)", " ".join(container["lifecycle"]["preStop"]["exec"]["command"])
    )
    assert int(wait) == 5
    assert spec["terminationGracePeriodSeconds"] > 5 + args.timeout + args.client_seconds == 112
    assert kinds["Deployment"]["spec"]["replicas"] == 1


@pytest.mark.parametrize(
    ("words", "kind", "limits"),
    [
        (["--cpu-percent", "70"], "HorizontalPodAutoscaler", ("minReplicas", "maxReplicas")),
        (
            ["--waiting", "4", "--prometheus", "http://prometheus:9090"],
            "ScaledObject",
            ("minReplicaCount", "maxReplicaCount"),
        ),
    ],
)
def test_servers_are_added_by_a_signal_and_the_deployment_says_no_number(
    words: list[str], kind: str, limits: tuple[str, str], bundle: Path, tmp_path: Path
) -> None:
    kinds = written(bundle, tmp_path / "out", "--replicas", "2", "--max-replicas", "8", *words)
    spec = kinds[kind]["spec"]
    assert "replicas" not in kinds["Deployment"]["spec"]
    assert [spec[n] for n in limits] == [2, 8]
    target = spec["scaleTargetRef"]
    named = kinds["Deployment"]["metadata"]["name"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        "apps/v1",
        "Deployment",
        named,
    )
    if kind == "ScaledObject":
        metadata = spec["triggers"][0]["metadata"]
        assert metadata["threshold"] == "4"
        assert metadata["query"] == 'sum(nv_inference_pending_request_count{model="tiny"})'


def test_memory_is_what_the_server_took_here_and_processors_are_its_threads(
    bundle: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    document = deployed(bundle, "--to", "kubernetes", "--out", out, *NEEDED)
    server = document["server"]
    assert server["memory_mib"] << 20 >= server["measured"]["peak"] > 30 << 20
    deployment = next(yaml.safe_load_all((out / "kubernetes.yaml").read_text()))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    requests = container["resources"]["requests"]
    assert requests == {"cpu": "1", "memory": f"{server['memory_mib']}Mi"}


def test_of_texts_that_are_continued_the_cache_and_the_longest_count(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measured(folder: Path, arguments: tuple[str, ...]) -> MeasuredServer:
        assert arguments == ("--slots", "4")
        return MeasuredServer("onnxruntime-cpu", 100 << 20, 50 << 20, 200.0)

    monkeypatch.setattr(servers, "measure", measured)
    words = (*NEEDED, "--to", "kubernetes", "--out", tmp_path / "out", "--", "--slots", "4")
    server = deployed(decoder_bundle, *words)["server"]
    assert (server["memory_mib"], server["drain_seconds"]) == (150, 30 + 200 + 10)


def test_the_cache_of_a_decoder_is_measured(decoder_bundle: Path) -> None:
    measured = measure(decoder_bundle, ["--slots", "2"])
    assert measured.engine == "onnxruntime-cpu"
    assert measured.longest > 0
    assert measured.memory >= measured.peak > 30 << 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (NEEDED[:2], "--endpoint-seconds is required by --to kubernetes"),
        ([*GIVEN, "--max-replicas", "2"], "--max-replicas needs exactly one of"),
        ([*GIVEN, "--max-replicas", "2", "--waiting", "1"], "need each other"),
        ([*GIVEN, "--cpu-percent", "70"], "--max-replicas needs exactly one of"),
        (
            [*GIVEN, "--max-replicas", "2", "--replicas", "3", "--cpu-percent", "70"],
            "is below --replicas 3",
        ),
        ([*GIVEN, "--name", "Tiny_1"], "is not a valid Service name"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_started(
    words: list[str], message: str, bundle: Path, tmp_path: Path
) -> None:
    result = run(bundle, "--to", "kubernetes", "--out", tmp_path / "out", *words)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_option_of_another_platform_is_refused(bundle: Path, tmp_path: Path) -> None:
    result = run(bundle, "--to", "triton", "--out", tmp_path / "out", *NEEDED)
    assert (result.exit_code, "does not apply to --to triton" in result.stderr) == (2, True)


@pytest.mark.parametrize(("workers", "each"), [("1", 3), ("3", 1), ("8", 1)])
def test_an_engine_of_one_thread_per_processor_gets_as_many_as_are_requested(
    bundle: Path, tmp_path: Path, workers: str, each: int
) -> None:
    out, words = tmp_path / "out", (*NEEDED, "--memory-mib", "300", "--", "--threads", "0")
    words = (*words, "--workers", workers)
    result = run(bundle, "--to", "kubernetes", "--out", out, *words)
    assert (result.exit_code, "Give --cpu N" in result.stderr) == (2, True)
    document = deployed(bundle, "--to", "kubernetes", "--out", out, "--cpu", "3", *words)
    text = (out / "kubernetes.yaml").read_text()
    deployment = next(yaml.safe_load_all(text))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert parser("serve").parse_args(container["args"]).threads == each
    assert document["server"]["cpu"] == 3


def test_a_bundle_that_names_no_packages_of_serve_gets_no_image(
    bundle: Path, tmp_path: Path
) -> None:
    good = source.read(bundle, "harness/__main__.py")
    files = {n: f for n, f in good.manifest["files"].items() if n != "requirements-serve.txt"}
    without = replace(good, manifest={**good.manifest, "files": files})
    with pytest.raises(InputError, match=r"no requirements-serve.txt.*pip install 'optimize-tool"):
        image.write(without, tmp_path, 8000)
    assert not list(tmp_path.iterdir())


def test_every_worker_gets_the_processors_of_its_threads(bundle: Path, tmp_path: Path) -> None:
    words = (*NEEDED, "--memory-mib", "300", "--", "--threads", "2", "--workers", "3")
    document = deployed(bundle, "--to", "kubernetes", "--out", tmp_path / "out", *words)
    assert document["server"]["cpu"] == 6


def test_the_image_starts_a_server_for_all_addresses_and_not_as_root(
    bundle: Path, tmp_path: Path
) -> None:
    written(bundle, tmp_path / "out")
    text = (tmp_path / "out" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [shlex.split(line) for line in text.splitlines() if line and line[0] != "#"]
    for line in lines:
        if line[0] == "COPY":
            assert (tmp_path / "out" / line[1]).exists()
    installed = [w for line in lines if line[0] == "RUN" for w in line if w.startswith("/opt/req")]
    manifest = json.loads((bundle / "manifest.json").read_text())
    names = {n for n in manifest["files"] if n.startswith("requirements")}
    assert {Path(w).name for w in installed} == names
    arguments = json.loads(text[text.index("CMD ") + 4 :].splitlines()[0])
    assert parser("serve").parse_args(arguments).host == "0.0.0.0"
    assert "USER 65534:65534" in text
