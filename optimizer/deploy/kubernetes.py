"""Plain Kubernetes: Deployment, Service, autoscaler and disruption budget in one file.

Servers of one bundle are identical and stateless. A server that ends is first removed from the
Service (endpoint_seconds), then answers the requests that it accepted (drain).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from optimizer.deploy import image
from optimizer.deploy.output import Output
from optimizer.deploy.server import LIVE, METRICS, PORT, READY, DeployedServer
from optimizer.deploy.server import describe_server as serving
from optimizer.deploy.settings import DeployOptions, check_scaling
from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import RecipeError

NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")  # name of a Service, RFC 1035
VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")  # value of a label
FILE = "kubernetes.yaml"
Document = dict[str, Any]


def write(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write kubernetes.yaml, Dockerfile and bundle/. Raises RecipeError for conflicting options."""
    scaler = _scaler(source, settings)  # checks options before the server is started and measured
    server = serving(source, settings)
    documents = list(build_manifests(source, settings, server, scaler))
    image.write(source, out, PORT)
    (out / FILE).write_text(yaml.safe_dump_all(documents, sort_keys=False))
    named = shlex.quote(str(settings.image))
    built = [f"docker build -t {named} OUT", f"docker push {named}"]
    return Output([*built, f"kubectl apply -f OUT/{FILE}"], server.document)


def build_manifests(
    source: BundleSource, settings: DeployOptions, server: DeployedServer, scaler: Document | None
) -> Iterator[Document]:
    """Yield the Kubernetes objects: Deployment, Service, `scaler` if given, and a disruption budget
    if replicas > 1."""
    yield _deployment(source, settings, server, scaled=scaler is not None)
    yield _service(source, settings)
    if scaler is not None:
        yield scaler
    if (settings.replicas or 1) > 1:  # with one replica it would block every eviction
        selector = {"matchLabels": _selector(source, settings)}
        budget = {"maxUnavailable": 1, "selector": selector}
        yield _object("policy/v1", "PodDisruptionBudget", source, settings, budget)


def name(source: BundleSource, settings: DeployOptions) -> str:
    """Return the name of the Kubernetes objects: --name, else the bundle's. Raises RecipeError if
    it is invalid."""
    chosen = settings.name or source.name
    if not NAME.fullmatch(chosen):
        raise RecipeError(
            f"{chosen!r} is not a valid Service name",
            where="command line: --name" if settings.name else "manifest.json: name",
            accepted="a lower-case letter, then a-z, 0-9 and -, up to 63 characters",
            fix="Give --name.",
        )
    return chosen


def labels(source: BundleSource, settings: DeployOptions) -> dict[str, str]:
    """Return the labels of all Kubernetes objects: the name, and the version if it is a valid label
    value."""
    version = {"app.kubernetes.io/version": source.version}
    return _selector(source, settings) | (version if VALUE.fullmatch(source.version) else {})


def build_container(server: DeployedServer, settings: DeployOptions) -> Document:
    """Return the server's container: unprivileged, with a read-only root file system."""
    take: Document = {"requests": {"cpu": str(server.cpu), "memory": f"{server.memory}Mi"}}
    if server.gpus:
        take["limits"] = {"nvidia.com/gpu": server.gpus}
    wait = f"import time; time.sleep({settings.endpoint_seconds})"
    return {
        "name": "server",
        "image": settings.image,
        "args": list(server.arguments),
        "ports": [{"name": "http", "containerPort": PORT}],
        "livenessProbe": {"httpGet": {"path": LIVE, "port": PORT}},
        "readinessProbe": {"httpGet": {"path": READY, "port": PORT}},
        "lifecycle": {"preStop": {"exec": {"command": ["python", "-c", wait]}}},
        "resources": take,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }


def build_pod(server: DeployedServer, settings: DeployOptions) -> Document:
    """Build the spec of a Kubernetes pod of the bundle's server, without the field `containers`."""
    return {
        "terminationGracePeriodSeconds": (settings.endpoint_seconds or 0) + server.drain + 1,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": image.USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }


def scrape() -> dict[str, str]:
    """Return the annotations of a Kubernetes pod by which Prometheus finds the server's metrics."""
    return {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(PORT),
        "prometheus.io/path": METRICS,
    }


def _deployment(
    source: BundleSource, settings: DeployOptions, server: DeployedServer, *, scaled: bool
) -> Document:
    """Return the Deployment. scaled: True leaves the number of replicas to the autoscaler"""
    selector = _selector(source, settings)
    replicas = {} if scaled else {"replicas": settings.replicas or 1}
    spec = {
        **replicas,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0}},
        "template": {
            "metadata": {"labels": labels(source, settings), "annotations": scrape()},
            "spec": {
                **build_pod(server, settings),
                "containers": [build_container(server, settings)],
            },
        },
    }
    return _object("apps/v1", "Deployment", source, settings, spec)


def _service(source: BundleSource, settings: DeployOptions) -> Document:
    ports = [{"name": "http", "port": PORT, "targetPort": "http"}]
    spec = {"selector": _selector(source, settings), "ports": ports}
    return _object("v1", "Service", source, settings, spec)


def _scaler(source: BundleSource, settings: DeployOptions) -> Document | None:
    """Return the autoscaler: an HPA by processor time, or a KEDA ScaledObject by waiting requests.

    None without --max-replicas.
    """
    named = name(source, settings)
    check_scaling(settings)
    if settings.max_replicas is None:
        return None
    least = settings.replicas or 1
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": named}
    if settings.cpu_percent is not None:
        usage = {"type": "Utilization", "averageUtilization": settings.cpu_percent}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": usage}}
        spec = {
            "scaleTargetRef": target,
            "minReplicas": least,
            "maxReplicas": settings.max_replicas,
            "metrics": [metric],
        }
        return _object("autoscaling/v2", "HorizontalPodAutoscaler", source, settings, spec)
    spec = {
        "scaleTargetRef": target,
        "minReplicaCount": least,
        "maxReplicaCount": settings.max_replicas,
        "triggers": [{"type": "prometheus", "metadata": _trigger(source, settings)}],
    }
    return _object("keda.sh/v1alpha1", "ScaledObject", source, settings, spec)


def _trigger(source: BundleSource, settings: DeployOptions) -> dict[str, str]:
    """Return the KEDA trigger; KEDA compares the query's value per replica with the threshold."""
    metric = "nv_inference_pending_request_count"
    return {
        "serverAddress": str(settings.prometheus),
        "query": f'sum({metric}{{model="{source.name}"}})',
        "threshold": str(settings.waiting),
    }


def _selector(source: BundleSource, settings: DeployOptions) -> dict[str, str]:
    return {"app.kubernetes.io/name": name(source, settings)}


def _object(
    version: str, kind: str, source: BundleSource, settings: DeployOptions, spec: Document
) -> Document:
    metadata = {"name": name(source, settings), "labels": labels(source, settings)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
