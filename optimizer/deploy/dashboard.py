"""Grafana dashboard of a server: one panel per question about its /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.deploy.source import BundleSource

DATASOURCE = "prometheus"  # uid of the datasource that compose.py provisions
SCHEMA = 41  # version of the document, Grafana 12's; later ones migrate it
MODELS = "$model"  # models that are shown, chosen on the dashboard
WINDOW = "$__rate_interval"  # Grafana's shortest window for the scrape interval
WIDTH, HEIGHT = 8, 8  # panel size in grid units; a row has 24
QUANTILES = (0.5, 0.9, 0.99)
FROM = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One chart of the Grafana dashboard.

    unit: name of the unit in Grafana.
    queries: {legend: PromQL}.
    """

    title: str
    unit: str
    queries: dict[str, str]


def _of(name: str) -> str:
    """Return the PromQL selector of a server's metric, limited to the models chosen on the
    dashboard."""
    return f'{name}{{model=~"{MODELS}"}}'


def _rate(name: str, by: str = "") -> str:
    return _rate_of(_of(name), by)


def _rate_of(series: str, by: str = "") -> str:
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({series}[{WINDOW}]))"


def _quantiles(histogram: str) -> dict[str, str]:
    rate = _rate(f"{histogram}_bucket", "le")
    return {f"p{100 * q:g}": f"histogram_quantile({q}, {rate})" for q in QUANTILES}


ALL_MODELS = (
    Panel("Requests answered", "reqps", {"answered": _rate("nv_inference_request_success")}),
    Panel(
        "Requests of all models by status",
        "reqps",
        {"{{status}}": _rate_of("optimize_requests_total", "status")},
    ),
    Panel(
        "Requests not answered",
        "reqps",
        {"{{reason}}": _rate("nv_inference_request_failure", "reason")},
    ),
    Panel("Time of a request", "s", _quantiles("optimize_request_seconds")),
    Panel("Waiting", "short", {"rows": f"sum ({_of('nv_inference_pending_request_count')})"}),
    Panel("Time in the queue", "s", _quantiles("optimize_request_queue_seconds")),
    Panel("Time of a batch in the model", "s", _quantiles("optimize_request_predict_seconds")),
    Panel(
        "Rows of a batch",
        "short",
        {"mean": f"{_rate('nv_inference_count')} / {_rate('nv_inference_exec_count')}"},
    ),
    Panel(
        "Batches that changed an answer",
        "short",
        {
            "run again": _rate("optimize_batch_rechecked_total"),
            "not equal": _rate("optimize_batch_unequal_total"),
        },
    ),
    Panel(
        "Answers given again",
        "reqps",
        {
            "the same request": _rate("nv_cache_num_hits_per_model"),
            "not kept": _rate("nv_cache_num_misses_per_model"),
        },
    ),
)
GENERATION = (
    Panel(
        "Texts",
        "short",
        {
            "have a slot": f"sum ({_of('vllm:num_requests_running')})",
            "wait for one": f"sum ({_of('vllm:num_requests_waiting')})",
        },
    ),
    Panel(
        "Tokens a second",
        "short",
        {
            "of prompts": _rate("vllm:prompt_tokens_total"),
            "new": _rate("vllm:generation_tokens_total"),
        },
    ),
    Panel(
        "Answers to questions that are alike",
        "reqps",
        {
            "given": _rate("optimize_semantic_cache_hits_total"),
            "none alike": _rate("optimize_semantic_cache_misses_total"),
            "not looked for": _rate("optimize_semantic_cache_skipped_total"),
        },
    ),
    Panel("Time to the first token", "s", _quantiles("vllm:time_to_first_token_seconds")),
    Panel("Time between tokens", "s", _quantiles("vllm:inter_token_latency_seconds")),
)


def build_dashboard(source: BundleSource) -> dict[str, Any]:
    """Return the dashboard of a bundle's server as Grafana's JSON document."""
    panels = (*ALL_MODELS, *(GENERATION if source.generates else ()))
    return {
        "uid": f"server-{source.name}"[:40],
        "title": f"{source.name} {source.version}",
        "schemaVersion": SCHEMA,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(i, panel) for i, panel in enumerate(panels)],
    }


def _variables() -> list[dict[str, Any]]:
    """Return the dashboard's two variables: the Prometheus datasource, and the models to show."""
    query = "label_values(nv_inference_request_success, model)"
    return [
        {
            "name": "datasource",
            "label": "Datasource",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "current": {"text": "Prometheus", "value": DATASOURCE},
        },
        {
            "name": "model",
            "label": "Model",
            "type": "query",
            "datasource": FROM,
            "definition": query,
            "query": {"query": query, "refId": "model"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panel(index: int, panel: Panel) -> dict[str, Any]:
    column, row = index % (24 // WIDTH), index // (24 // WIDTH)
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": FROM,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": FROM,
                "expr": query,
                "legendFormat": legend,
            }
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }
