"""Docker Compose: one server, a Prometheus that reads its metrics, a Grafana that draws them.

The server listens on all addresses of its container; all three are published on 127.0.0.1 of the
machine only. Grafana shows its one dashboard, read-only, without a login.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from optimizer.deploy import dashboard, image
from optimizer.deploy.output import Output
from optimizer.deploy.server import METRICS, PORT, READY, DeployedServer
from optimizer.deploy.server import describe_server as serving
from optimizer.deploy.settings import DeployOptions
from optimizer.deploy.source import BundleSource

FILE = "compose.yaml"
PROMETHEUS, GRAFANA = 9090, 3000  # their default ports
PROMETHEUS_IMAGE = "docker.io/prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "docker.io/grafana/grafana:11.6.0"
SCRAPE = "5s"  # resolution of the dashboard
BOARDS = "/etc/grafana/dashboards"
DATASOURCES, PROVIDERS = (f"provisioning/{kind}" for kind in ("datasources", "dashboards"))


def write(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write the files with which Docker Compose starts the bundle: compose.yaml, the configuration
    of the three services, and the image's files."""
    server = serving(source, settings)
    image.write(source, out, PORT)
    texts = {
        FILE: _yaml(build_compose(source, settings, server)),
        "prometheus.yml": _yaml(scrape_config()),
        f"grafana/{DATASOURCES}/prometheus.yml": _yaml(_datasource()),
        f"grafana/{PROVIDERS}/files.yml": _yaml(_provider()),
        "grafana/dashboards/server.json": json.dumps(dashboard.build_dashboard(source), indent=1)
        + "\n",
    }
    for name, text in texts.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text)
    ask = f"curl 127.0.0.1:{PORT}{READY}"
    return Output([f"docker compose -f OUT/{FILE} up -d --build", ask], server.document)


def build_compose(
    source: BundleSource, settings: DeployOptions, server: DeployedServer
) -> dict[str, Any]:
    """Build compose.yaml, with which Docker Compose starts the bundle's server."""
    check = f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{PORT}{READY}')"
    served: dict[str, Any] = {
        "build": ".",
        "image": settings.image or f"{source.name}:{source.version}",
        "command": list(server.arguments),
        "ports": [_published(PORT)],
        "healthcheck": {"test": ["CMD", "python", "-c", check]},
        "stop_grace_period": f"{server.drain + 1}s",
        "mem_reservation": f"{server.memory}m",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "restart": "unless-stopped",
    }
    if server.gpus:
        device = {"driver": "nvidia", "count": server.gpus, "capabilities": ["gpu"]}
        served["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    services = {
        "server": served,
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            "ports": [_published(PROMETHEUS)],
            "volumes": ["./prometheus.yml:/etc/prometheus/prometheus.yml:ro"],
        },
        "grafana": {
            "image": GRAFANA_IMAGE,
            "ports": [_published(GRAFANA)],
            "environment": _grafana(),
            "volumes": [
                "./grafana/provisioning:/etc/grafana/provisioning:ro",
                f"./grafana/dashboards:{BOARDS}:ro",
            ],
        },
    }
    return {"name": f"{source.name}".replace(".", "-"), "services": services}


def scrape_config() -> dict[str, Any]:
    """Build prometheus.yml, by which Prometheus reads the server's metrics."""
    job = {
        "job_name": "server",
        "metrics_path": METRICS,
        "static_configs": [{"targets": [f"server:{PORT}"]}],
    }
    times = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    return {"global": times, "scrape_configs": [job]}


def _published(port: int) -> str:
    return f"127.0.0.1:{port}:{port}"


def _grafana() -> dict[str, str]:
    return {
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{BOARDS}/server.json",
    }


def _datasource() -> dict[str, Any]:
    source = {
        "name": "Prometheus",
        "uid": dashboard.DATASOURCE,
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://prometheus:{PROMETHEUS}",
        "isDefault": True,
        "jsonData": {"timeInterval": SCRAPE},
    }
    return {"apiVersion": 1, "datasources": [source]}


def _provider() -> dict[str, Any]:
    options = {"path": BOARDS}
    provider = {"name": "files", "type": "file", "allowUiUpdates": False, "options": options}
    return {"apiVersion": 1, "providers": [provider]}


def _yaml(document: dict[str, Any]) -> str:
    return yaml.safe_dump(document, sort_keys=False)
