"""Deployments of a bundle for vLLM name the sizes of its recipe. None is run: it needs GPUs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from optimizer.harness.commands.command_line import parse_arguments
from tests.deploy.conftest import deployed, run
from tests.harness.commands.test_vllm_server import FIT, for_vllm

NEEDED = ("--image", "registry.example.com/llm:1", "--endpoint-seconds", "5")


@pytest.fixture
def llm(decoder_bundle: Path, tmp_path: Path) -> Path:
    return for_vllm(Path(shutil.copytree(decoder_bundle, tmp_path / "bundle")))


def test_a_pod_has_the_gpus_of_all_parts_and_waits_for_the_model(llm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = deployed(llm, "--to", "kubernetes", "--out", out, *NEEDED)
    (deployment, _) = yaml.safe_load_all((out / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert document["server"]["fit"] == FIT
    probes = {
        container[f"{p}Probe"]["httpGet"]["path"] for p in ("startup", "liveness", "readiness")
    }
    assert probes == {"/health"}
    args = parse_arguments(container["args"])
    assert (args.host, args.port) == ("0.0.0.0", container["ports"][0]["containerPort"])
    mounts = {m["mountPath"] for m in container["volumeMounts"]}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert mounts == {"/tmp", "/dev/shm"}
    assert (out / "bundle" / "manifest.json").is_file()


def test_ray_gets_the_engine_s_options_and_the_folder_in_its_image(
    llm: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    deployed(llm, "--to", "ray", "--out", out, "--replicas", "3")
    (application,) = yaml.safe_load((out / "serve.yaml").read_text())["applications"]
    (config,) = application["args"]["llm_configs"]
    sizes = {name: FIT[name] for name in FIT if name != "compute_capability"}
    assert config["engine_kwargs"] == sizes
    assert config["deployment_config"] == {"num_replicas": 3}
    model = config["model_loading_config"]["model_source"]
    assert (out / model.removeprefix("/")).is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "triton"), "triton was given for a bundle that vLLM serves"),
        (("--to", "kubernetes", *NEEDED, "--max-replicas", "4"), "--max-replicas was given"),
        (("--to", "kubernetes", *NEEDED, "--", "--rows", "4"), "options after -- was given"),
    ],
)
def test_what_vllm_does_not_have_is_refused(
    words: tuple[str, ...], message: str, llm: Path, tmp_path: Path
) -> None:
    result = run(llm, "--out", tmp_path / "out", *words)
    assert result.exit_code == 2
    assert message in result.stderr
