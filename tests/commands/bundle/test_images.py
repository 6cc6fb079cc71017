"""The Dockerfiles in pipelines/images: what they copy and install exists, and the bundle's runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.conftest import sentences
from tests.package.bundles import small_bundle
from tests.publish.registries.test_registry import REGISTRY, SKOPEO, docker_registry

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "pipelines" / "images"
ROOTFS = os.environ.get("OPTIMIZE_TEST_ROOTFS", "")
BUILDAH = shutil.which("buildah")
INSTRUCTION = re.compile(r"(ARG|FROM|ENV|RUN|COPY|WORKDIR|USER|ENTRYPOINT|CMD) ")


def instructions(name: str) -> list[str]:
    """The Dockerfile's instructions, a line each; raises AssertionError on what is none."""
    text = (IMAGES / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not INSTRUCTION.match(line)] == []
    return lines


@pytest.mark.parametrize("name", ["bundle", "cpu", "cuda"])
def test_an_image_has_a_base_that_can_be_replaced_and_is_not_run_as_root(name: str) -> None:
    lines = instructions(name)
    assert lines[0].startswith("ARG BASE=")
    assert lines[1] == "FROM ${BASE}"
    assert "USER 65534:65534" in lines
    assert all(json.loads(line[4:]) for line in lines if line.startswith("CMD "))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_what_the_toolchains_images_copy_and_install_is_there(name: str) -> None:
    lines = instructions(name)
    extras = next(line for line in lines if line.startswith("ARG EXTRAS=")).partition("=")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert [word for word in copied if not (ROOT / word).exists()] == []
    assert project["readme"] in copied


@pytest.mark.slow
@pytest.mark.skipif(BUILDAH is None, reason="buildah is not on the PATH")
@pytest.mark.skipif(REGISTRY is None or SKOPEO is None, reason="docker-registry or skopeo is not")
@pytest.mark.skipif(
    not ROOTFS,
    reason="OPTIMIZE_TEST_ROOTFS names no base: mmdebstrap --variant=minbase "
    "--include=python3-venv,python3-pip,ca-certificates bookworm rootfs.tar",
)
def test_the_bundles_image_answers_and_comes_back_from_a_registry(tmp_path: Path) -> None:
    bundle = small_bundle.make(tmp_path / "made") / "bundle"
    wheels, text = tmp_path / "wheels", sentences(1, seed=3)[0]
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels]
    subprocess.run([*download, "-r", bundle / "requirements.txt"], check=True, capture_output=True)
    storage = ["--root", tmp_path / "root", "--runroot", tmp_path / "run", "--storage-driver=vfs"]

    def buildah(*arguments: object) -> str:
        command = [str(a) for a in (BUILDAH, *storage, *arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    base = buildah("from", "scratch")
    buildah("add", "--quiet", base, ROOTFS, "/")
    buildah("commit", "--quiet", base, "localhost/base:1")
    options = ["--build-arg", "BASE=localhost/base:1", "--volume", f"{wheels}:/wheels:ro"]
    options += ["--build-arg", "PIP_OPTIONS=--no-index --find-links /wheels"]
    file = IMAGES / "bundle.Dockerfile"
    buildah("bud", "--isolation=chroot", *options, "-f", file, "-t", "localhost/tiny:1", bundle)
    with docker_registry(tmp_path) as host:
        buildah("push", "--tls-verify=false", "localhost/tiny:1", f"docker://{host}/tiny:1")
        config = subprocess.run(
            [str(SKOPEO), "inspect", "--tls-verify=false", "--config", f"docker://{host}/tiny:1"],
            capture_output=True,
            text=True,
            check=True,
        )
        buildah("rmi", "--all", "--force")
        container = buildah("from", "--tls-verify=false", f"docker://{host}/tiny:1")
    assert json.loads(config.stdout)["config"]["Entrypoint"] == ["python", "-m", "harness"]
    entry = ["--isolation=chroot", container, "--", "python", "-m", "harness"]
    answer = json.loads(buildah("run", *entry, "predict", "--json", text))
    here = small_bundle.python(bundle, "-m", "harness", "predict", "--json", text)
    assert answer == json.loads(here.stdout)
