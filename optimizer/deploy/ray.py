"""Ray Serve: an application whose replicas run the bundle's server on a Ray cluster.

serve.yaml        configuration of Ray Serve (ray.serve.schema.ServeDeploySchema)
application.py    module that serve.yaml imports, beside bundle/
Dockerfile        an image of Ray's with both, for clusters that run images

Ray places, checks and replaces replicas and routes requests to them. Batching, slots, deadlines
and admission control happen in each replica, so Ray's own request limit is set to the server's.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from optimizer.deploy.output import Output
from optimizer.deploy.server import PORT, DeployedServer
from optimizer.deploy.server import describe_server as serving
from optimizer.deploy.settings import DeployOptions
from optimizer.deploy.source import BundleSource
from optimizer.harness.server.options import CONNECTIONS

FILE = "serve.yaml"
DOCKERFILE = """\
# docker build --build-arg BASE=rayproject/ray:RELEASE-py312 -t IMAGE .
# BASE: an image with Ray Serve, whose Python is 3.11 or newer.
# PIP_OPTIONS: a private index, or --no-index --find-links for a site without a network.
ARG BASE
FROM ${BASE}
ARG PIP_OPTIONS=""
COPY bundle/requirements.txt /tmp/requirements.txt
RUN python -m pip install --no-cache-dir ${PIP_OPTIONS} -r /tmp/requirements.txt
COPY application.py /application/application.py
COPY bundle /application/bundle
ENV PYTHONPATH=/application
"""


def write(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write serve.yaml, application.py, Dockerfile and bundle/. Raises the errors of `serving`."""
    server = serving(source, settings)
    source.copy(out / "bundle")
    template = files("optimizer.deploy") / "templates" / "application.py.txt"
    (out / "application.py").write_text(template.read_text())
    (out / "Dockerfile").write_text(DOCKERFILE)
    (out / FILE).write_text(yaml.safe_dump(config(source, settings, server), sort_keys=False))
    build = "docker build --build-arg BASE=rayproject/ray:RELEASE-py312 -t IMAGE OUT"
    return Output([f"PYTHONPATH=OUT serve run OUT/{FILE}", build], server.document)


def config(source: BundleSource, settings: DeployOptions, server: DeployedServer) -> dict[str, Any]:
    """Build serve.yaml, with which Ray Serve starts the bundle; it listens on 127.0.0.1."""
    name = settings.name or source.name
    actor: dict[str, Any] = {"num_cpus": server.cpu, "memory": server.memory << 20}
    if server.gpus:
        actor["num_gpus"] = server.gpus
    deployment = {
        "name": name,
        "num_replicas": settings.replicas or 1,
        "max_ongoing_requests": CONNECTIONS,
        "graceful_shutdown_timeout_s": server.drain,
        "ray_actor_options": actor,
    }
    application = {
        "name": name,
        "route_prefix": "/",
        "import_path": "application:build",
        "args": {"name": name, "options": list(server.options)},
        "deployments": [deployment],
    }
    return {"http_options": {"host": "127.0.0.1", "port": PORT}, "applications": [application]}
