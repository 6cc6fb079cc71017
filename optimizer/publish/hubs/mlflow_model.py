"""A bundle as a model in MLflow's format, and what an MLflow run says of it.

The folder of the model: MLmodel, python_env.yaml and requirements.txt; code/ with the loader
(pyfunc.py); bundle/, unchanged. https://mlflow.org/docs/latest/ml/model/, "MLmodel".
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
from optimizer.package.report.metrics import metrics
from optimizer.publish.hubs import pyfunc

BUNDLE = "bundle"
LOADER = "optimize_bundle"
LONGEST_PARAMETER = 500  # characters; what servers since the first take
NAME = re.compile(r"[^\w\-. :/]")
"""Characters that the name of a metric or parameter may not hold."""

Document = Mapping[str, Any]


def model_files(manifest: Document, requirements: str, mlflow_version: str) -> dict[str, bytes]:
    """{name: bytes} of the model's files beside the bundle.

    requirements: the bundle's requirements.txt. The same bundle and version give the same bytes.
    """
    kind = tasks.task(manifest["contract"]["task"]).inputs.name
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


def figures(reports: Sequence[Document]) -> dict[str, float]:
    """{name: number} of report.json, by names that MLflow takes."""
    return {NAME.sub("_", name): value for name, value in metrics(reports).items()}


def parameters(recipe: Document) -> dict[str, str]:
    """{path in the recipe: value}. A list is JSON; null values and those longer than
    LONGEST_PARAMETER are left out; the manifest has them."""
    flat = {NAME.sub("_", name): text for name, text in _flat(recipe, "").items()}
    return {name: text for name, text in flat.items() if len(text) <= LONGEST_PARAMETER}


def _flat(value: Any, at: str) -> dict[str, str]:
    if isinstance(value, Mapping):
        parts = [_flat(part, f"{at}.{name}" if at else str(name)) for name, part in value.items()]
        return {name: text for part in parts for name, text in part.items()}
    if value is None:
        return {}
    return {at: value if isinstance(value, str) else json.dumps(value)}
