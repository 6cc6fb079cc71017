"""Bundles for vLLM: a Deployment of Kubernetes, or an application of Ray Serve LLM.

kubernetes   kubernetes.yaml, Dockerfile and bundle/; the image is vLLM's with the bundle, and
             starts `serve`, which verifies the model and starts vLLM. A pod has all GPUs of a
             server, so they belong to one machine
ray          serve.yaml and Dockerfile; Ray places the parts of a server, on several machines too

Neither was run on a GPU by this project.
"""

from __future__ import annotations

import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from optimizer.deploy import kubernetes as plain
from optimizer.deploy.output import Output
from optimizer.deploy.server import ANY, METRICS, PORT, DeployedServer
from optimizer.deploy.settings import DeployOptions
from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import RecipeError
from optimizer.harness.commands.vllm_server import END
from optimizer.harness.runtimes import vllm

HEALTH = "/health"
STARTING = 3600  # seconds in which a server must have loaded its model
SCALING = ("max_replicas", "cpu_percent", "waiting", "prometheus")
DOCKERFILE = """\
# BASE: an image with vLLM 0.33.0 and its Python packages.
ARG BASE={base}
FROM ${{BASE}}
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 HOME=/tmp
COPY bundle /bundle
WORKDIR /bundle
{start}"""
START = """\
USER 65534:65534
EXPOSE {port}
ENTRYPOINT ["python3", "-m", "harness"]
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
"""


def kubernetes(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write the Kubernetes files with which vLLM serves the bundle. Raises RecipeError for options
    that do not apply."""
    _check(settings)
    needed = _needed(source)
    drain = int(END) if settings.drain_seconds is None else settings.drain_seconds
    server = DeployedServer((), settings.memory_mib or 0, settings.cpu or 0, needed, drain, None)
    documents = list(plain.build_manifests(source, settings, server, None))
    pod = documents[0]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    requests = {"cpu": settings.cpu, "memory": settings.memory_mib and f"{settings.memory_mib}Mi"}
    get = {"httpGet": {"path": HEALTH, "port": PORT}}
    container |= {
        "args": ["serve", "--host", ANY, "--insecure", "--port", str(PORT)],
        "startupProbe": {**get, "periodSeconds": 10, "failureThreshold": STARTING // 10},
        "livenessProbe": get,
        "readinessProbe": get,
        "resources": {
            "requests": {name: str(value) for name, value in requests.items() if value},
            "limits": {"nvidia.com/gpu": needed},
        },
    }
    container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})
    # NCCL exchanges tensors of GPUs of one machine there
    pod["volumes"].append({"name": "shm", "emptyDir": {"medium": "Memory"}})
    source.copy(out / "bundle")
    base = "docker.io/vllm/vllm-openai:v0.33.0"
    (out / "Dockerfile").write_text(DOCKERFILE.format(base=base, start=START.format(port=PORT)))
    (out / plain.FILE).write_text(yaml.safe_dump_all(documents, sort_keys=False))
    named = shlex.quote(str(settings.image))
    built = [f"docker build -t {named} OUT", f"docker push {named}"]
    return Output([*built, f"kubectl apply -f OUT/{plain.FILE}"], _document(source, needed))


def ray(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write the files with which Ray Serve LLM serves the bundle. Raises RecipeError for options
    that do not apply."""
    _check(settings)
    source.copy(out / "bundle")
    base = "docker.io/rayproject/ray-llm:2.60.0"
    (out / "Dockerfile").write_text(DOCKERFILE.format(base=base, start=""))
    (out / "serve.yaml").write_text(yaml.safe_dump(ray_config(source, settings), sort_keys=False))
    build = "docker build -t IMAGE OUT"
    return Output([build, "serve run OUT/serve.yaml"], _document(source, _needed(source)))


def ray_config(source: BundleSource, settings: DeployOptions) -> dict[str, Any]:
    """Build serve.yaml, with which Ray Serve starts vLLM with the bundle; it listens on
    127.0.0.1."""
    name = settings.name or source.name
    options = vllm.list_engine_options(_fit(source)).items()
    model = PurePosixPath("/bundle", _engine(source)["model"]).parent
    config = {
        "model_loading_config": {"model_id": name, "model_source": str(model)},
        "engine_kwargs": {o.removeprefix("--").replace("-", "_"): value for o, value in options},
        "deployment_config": {"num_replicas": settings.replicas or 1},
    }
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": {"llm_configs": [config]},
    }
    return {"http_options": {"host": "127.0.0.1", "port": PORT}, "applications": [application]}


def _check(settings: DeployOptions) -> None:
    """Check the options of deploying vLLM: raise RecipeError for those of the bundle's own server,
    and for autoscaling signals that vLLM does not have."""
    refused = [f"--{n.replace('_', '-')}" for n in SCALING if getattr(settings, n) is not None]
    if settings.arguments:
        refused.append("options after --")
    if refused:
        raise RecipeError(
            f"{refused[0]} was given for a bundle that vLLM serves",
            where="command line",
            accepted="--name, --image, --replicas, --memory-mib, --cpu, --drain-seconds, "
            "--endpoint-seconds, where the platform has them",
            fix="Scale it by vLLM's own metrics (vllm:num_requests_waiting at "
            f"{METRICS}) with a tool of the cluster.",
        )


def _engine(source: BundleSource) -> dict[str, Any]:
    engine = source.for_vllm
    assert engine is not None
    return engine


def _fit(source: BundleSource) -> dict[str, Any]:
    fit: dict[str, Any] = _engine(source)["fit"]
    return fit


def _needed(source: BundleSource) -> int:
    return vllm.count_processes(_fit(source))


def _document(source: BundleSource, needed: int) -> dict[str, Any]:
    """Build the entry `server` of deploy.json, which describes a server of vLLM.

    needed: GPUs of one server
    """
    return {"measured": None, "gpus": needed, "fit": _fit(source)}
