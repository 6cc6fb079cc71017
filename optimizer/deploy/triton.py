"""Model repository of Triton Inference Server: the harness as a model of its python backend.

Dockerfile                                  Triton's image with the bundle's requirements
models/<name>/config.pbtxt                  model_config.proto as text
models/<name>/<version>/model.py
models/<name>/<version>/bundle/             an unchanged copy of the bundle
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np

from optimizer.deploy.output import Output
from optimizer.deploy.settings import DeployOptions, list_changed_options
from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.harness.server.inference import ANSWER
from optimizer.harness.server.options import choose_settings

MODELS = "models"
VERSION = re.compile(r"[1-9][0-9]*")  # Triton ignores folders with other names
TYPES = {"object": "TYPE_STRING", "float32": "TYPE_FP32", "int64": "TYPE_INT64"}
DOCKERFILE = """\
# docker build --build-arg BASE=nvcr.io/nvidia/tritonserver:RELEASE-py3 -t IMAGE .
# BASE: a Triton with the python backend, whose Python is 3.11 or newer.
# NUMPY: "numpy<2" for a Triton built for numpy 1, which otherwise refuses to load the model.
# PIP_OPTIONS: a private index, or --no-index --find-links for a site without a network.
ARG BASE
FROM ${{BASE}}
ARG PIP_OPTIONS=""
ARG NUMPY=""
COPY {bundle}/requirements.txt /opt/requirements.txt
RUN python3 -m pip install --no-cache-dir --break-system-packages ${{PIP_OPTIONS}} \\
    -r /opt/requirements.txt \\
    && if [ -n "${{NUMPY}}" ]; then \\
    python3 -m pip install --no-cache-dir --break-system-packages ${{PIP_OPTIONS}} "${{NUMPY}}"; fi
COPY {models} /models
CMD ["tritonserver", "--model-repository=/models"]
"""
Column = tuple[str, str, Sequence[int]]


def write(source: BundleSource, settings: DeployOptions, out: Path) -> Output:
    """Write models/ and Dockerfile. Raises RecipeError for options of `serve` except --rows."""
    others = list_changed_options(settings.arguments, ("rows",))
    if others:
        raise RecipeError(
            f"--{others[0].replace('_', '-')} configures our server, which Triton replaces",
            where="command line, after --",
            accepted="--rows",
            fix="Leave it out, and set Triton's own option in config.pbtxt.",
        )
    version = name_version_folder(source)
    model = out / MODELS / source.name
    bundle = model / version / "bundle"
    source.copy(bundle)
    (model / "config.pbtxt").write_text(
        build_config(source, choose_settings(source.manifest, settings.serve).rows)
    )
    template = files("optimizer.deploy") / "templates" / "model.py.txt"
    (model / version / "model.py").write_text(template.read_text())
    inside = bundle.relative_to(out).as_posix()
    (out / "Dockerfile").write_text(DOCKERFILE.format(models=MODELS, bundle=inside))
    build = "docker build --build-arg BASE=nvcr.io/nvidia/tritonserver:RELEASE-py3 -t IMAGE OUT"
    return Output([f"tritonserver --model-repository=OUT/{MODELS}", build])


def name_version_folder(source: BundleSource) -> str:
    """Name the folder of the model's version for Triton: the bundle's version if it accepts that,
    else "1"; config.pbtxt records it."""
    return source.version if VERSION.fullmatch(source.version) else "1"


def list_columns(source: BundleSource) -> tuple[list[Column], list[Column]]:
    """Return for Triton the inputs and the outputs as (name, dtype, shape of one row), as our
    server has."""
    task = tasks.look_up(source.contract)
    inputs: list[Column] = [(n, "object", ()) for n in task.fields(source.contract)]
    outputs = [(n, d, s) for n, (d, s) in task.tensors(source.contract).items()]
    return inputs, [*outputs, (ANSWER, "object", ())]


def build_config(source: BundleSource, rows: int) -> str:
    """Return the text of config.pbtxt, by which Triton serves the bundle.

    rows: maximum rows per batch.
    A scalar per row has dims [1], because Triton rejects empty dims. A request never waits for a
    batch while the model is idle: max_queue_delay_microseconds stays at its default, 0.
    """
    inputs, outputs = list_columns(source)
    task = tasks.look_up(source.contract)
    needed = inputs if task.extracts else [] if task.reads_texts else inputs[:1]
    lines = [
        f'name: "{source.name}"',
        'backend: "python"',
        f"max_batch_size: {rows}",
        *(line for c in inputs for line in _tensor("input", c, optional=c not in needed)),
        *(line for c in outputs for line in _tensor("output", c)),
        "dynamic_batching { }",
        "instance_group [ { count: 1 kind: KIND_CPU } ]",
        *_parameter("bundle_version", source.version),
        *_parameter("bundle_digest", str(source.manifest["digest"])),
    ]
    return "\n".join([*lines, ""])


def _tensor(field: str, column: Column, *, optional: bool = False) -> Iterator[str]:
    name, dtype, shape = column
    yield f"{field} [ {{"
    yield f'  name: "{name}"'
    yield f"  data_type: {TYPES[np.dtype(dtype).name]}"
    yield f"  dims: [ {', '.join(map(str, shape or (1,)))} ]"
    if optional:
        yield "  optional: true"
    yield "} ]"


def _parameter(key: str, value: str) -> Iterator[str]:
    yield f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
