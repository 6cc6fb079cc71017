"""Environment variables that keep libraries quiet and make sums in cuBLAS repeatable.

Libraries read them at import, so the command line (optimizer/cli.py) sets them first, and a search
on a cluster passes them to its processes (search/on_ray.py). Without HF_UPDATE_DOWNLOAD_COUNTS
library `datasets` would report each load of a local file to s3.amazonaws.com.
"""

from __future__ import annotations

from collections.abc import Mapping

ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",
    "ORT_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # with which cuBLAS sums alike in every run
}
PROGRESS_BARS = "HF_HUB_DISABLE_PROGRESS_BARS"
"""Variable that turns off the bars of downloads: "1" where stderr is not a terminal."""
