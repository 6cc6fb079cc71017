"""Convert a bundle to a model in MLflow's format, and its report to the metrics of an MLflow run.

The model's folder holds MLmodel, python_env.yaml, requirements.txt, the loader in code/ (pyfunc.py)
and the unchanged bundle in bundle/. https://mlflow.org/docs/latest/ml/model/, "MLmodel".
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from optimizer.harness import tasks
from optimizer.package.report.metrics import list_metrics
from optimizer.publish.hubs import pyfunc

BUNDLE = "bundle"
LOADER = "optimize_bundle"
LONGEST_PARAMETER = 500  # characters that every MLflow server accepts
NAME = re.compile(r"[^\w\-. :/]")
"""Characters that are not allowed in the name of a metric or parameter."""

Document = Mapping[str, Any]


def build_model_files(
    manifest: Document, requirements: str, mlflow_version: str
) -> dict[str, bytes]:
    """Return {name: bytes} of the files that make an MLflow model of the bundle, beside the bundle.

    requirements: content of the bundle's requirements.txt.
    mlflow_version: version of the package mlflow.
    """
    kind = tasks.find_task(manifest["contract"]["task"]).inputs.name
    columns = [
        {"type": "string", "name": kind, "required": True},
        {"type": "string", "name": f"{kind}_pair", "required": False},
    ]
    flavour = {
        "loader_module": LOADER,
        "code": "code",
        "data": BUNDLE,
        "env": {"virtualenv": "python_env.yaml"},
        "python_version": platform.python_version(),
    }
    model = {
        "flavors": {"python_function": flavour},
        "mlflow_version": mlflow_version,
        "model_uuid": manifest["digest"][:32],
        "signature": {"inputs": json.dumps(columns), "outputs": None, "params": None},
        "metadata": {"digest": manifest["digest"], "version": manifest["version"]},
    }
    environment = {
        "python": platform.python_version(),
        "build_dependencies": ["pip"],
        "dependencies": ["-r requirements.txt"],
    }
    return {
        "MLmodel": yaml.safe_dump(model, sort_keys=False).encode(),
        "python_env.yaml": yaml.safe_dump(environment, sort_keys=False).encode(),
        "requirements.txt": f"mlflow=={mlflow_version}\n{requirements}".encode(),
        f"code/{LOADER}.py": Path(pyfunc.__file__).read_bytes(),
    }


def collect_metrics(reports: Sequence[Document]) -> dict[str, float]:
    """Return {name: number} of the measurements in report.json, with names that MLflow accepts."""
    return {NAME.sub("_", name): value for name, value in list_metrics(reports).items()}


def flatten_recipe(recipe: Document) -> dict[str, str]:
    """Flatten a recipe to the parameters of an MLflow run: {path in the recipe: value}, a list as
    JSON, without null and too long values."""
    flat = {NAME.sub("_", name): text for name, text in _flatten(recipe, "").items()}
    return {name: text for name, text in flat.items() if len(text) <= LONGEST_PARAMETER}


def _flatten(value: Any, at: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        parts = [_flatten(v, f"{at}.{name}" if at else str(name)) for name, v in value.items()]
        return {name: text for part in parts for name, text in part.items()}
    if value is None:
        return {}
    return {at: value if isinstance(value, str) else json.dumps(value)}
