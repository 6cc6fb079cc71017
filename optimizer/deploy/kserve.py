"""KServe: a ServingRuntime of the bundle's image, and an InferenceService that uses it.

The image holds the model: nothing is fetched from a store, and the proven files are the files that
run. Pods are plain Deployments (RawDeployment), because the Knative mode allows neither a drain
time nor custom probes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from optimizer.deploy import image
from optimizer.deploy.kubernetes import Document, build_container, build_pod, labels, name, scrape
from optimizer.deploy.output import Output
from optimizer.deploy.server import PORT, DeployedServer
from optimizer.deploy.server import describe_server as serving
from optimizer.deploy.settings import DeployOptions, check_scaling
from optimizer.deploy.source import BundleSource

FILE = "kserve.yaml"
FORMAT = "optimize-bundle"  # model format that links the two objects
PROTOCOL = "v2"


def write(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write kserve.yaml, Dockerfile and bundle/. Raises RecipeError for conflicting options."""
    name(source, settings)
    check_scaling(settings)
    server = serving(source, settings)
    image.write(source, out, PORT)
    documents = list(build_manifests(source, settings, server))
    (out / FILE).write_text(yaml.safe_dump_all(documents, sort_keys=False))
    named = shlex.quote(str(settings.image))
    built = [f"docker build -t {named} OUT", f"docker push {named}"]
    return Output([*built, f"kubectl apply -f OUT/{FILE}"], server.document)


def build_manifests(
    source: BundleSource, settings: DeployOptions, server: DeployedServer
) -> Iterator[Document]:
    """Yield the ServingRuntime (container, volumes) and the InferenceService (the other fields)."""
    named = name(source, settings)
    metadata = {"name": named, "labels": labels(source, settings)}
    served: dict[str, Any] = {**build_container(server, settings), "name": "kserve-container"}
    served["ports"] = [{"name": "http1", "containerPort": PORT, "protocol": "TCP"}]
    outside = build_pod(server, settings)
    volumes = {"volumes": outside.pop("volumes")}
    runtime = {
        "annotations": scrape(),
        "supportedModelFormats": [{"name": FORMAT, "autoSelect": False}],
        "protocolVersions": [PROTOCOL],
        "containers": [served],
        **volumes,
    }
    yield {
        "apiVersion": "serving.kserve.io/v1alpha1",
        "kind": "ServingRuntime",
        "metadata": metadata,
        "spec": runtime,
    }
    model = {
        "modelFormat": {"name": FORMAT},
        "runtime": named,
        "protocolVersion": PROTOCOL,
        "resources": served["resources"],
    }
    predictor = {**_replicas(settings), **outside, "model": model}
    yield {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {
            **metadata,
            "annotations": {"serving.kserve.io/deploymentMode": "RawDeployment"},
        },
        "spec": {"predictor": predictor},
    }


def _replicas(settings: DeployOptions) -> Document:
    least = settings.replicas or 1
    if settings.max_replicas is None:
        return {"minReplicas": least, "maxReplicas": least}
    return {
        "minReplicas": least,
        "maxReplicas": settings.max_replicas,
        "scaleMetric": "cpu",
        "scaleTarget": settings.cpu_percent,
    }
