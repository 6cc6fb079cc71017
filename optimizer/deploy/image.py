"""Container image of a bundle: the bundle and its requirements, without the toolchain."""

from __future__ import annotations

from pathlib import Path

from optimizer.deploy.source import BundleSource
from optimizer.foundation.errors import InputError

REQUIREMENTS = ("requirements.txt", "requirements-serve.txt")
USER = 65534  # nobody
DOCKERFILE = """\
# BASE: an image with Python 3.11 or newer, venv and pip; for engines, one with NVIDIA's libraries.
# PIP_OPTIONS: a private index, or --no-index --find-links for a site without a network.
ARG BASE=docker.io/library/python:3.12-slim
FROM ${{BASE}}
ARG PIP_OPTIONS=""
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH HOME=/tmp
{copied}
RUN python3 -m venv /opt/venv \\
    && /opt/venv/bin/python -m pip install --no-cache-dir ${{PIP_OPTIONS}} {installed}
COPY bundle /bundle
WORKDIR /bundle
RUN python -m harness check
USER {user}:{user}
EXPOSE {port}
ENTRYPOINT ["python", "-m", "harness"]
CMD ["serve", "--host", "0.0.0.0", "--insecure"]
"""


def write(source: BundleSource, out: Path, port: int) -> None:
    """Write Dockerfile and bundle/ for `docker build OUT`.

    pip requires a hash of every package if any line of the requirement files has a hash.

    Raises InputError for a bundle that names no packages of `serve`, whose image could not serve.
    """
    for name in REQUIREMENTS:
        if name not in source.files:
            raise InputError(
                f"the bundle has no {name}, so an image of it cannot serve",
                where=str(source.folder),
                fix="Package the model again where the packages of serve are installed: "
                "pip install 'optimize-toolchain[serve]', then optimize RECIPE.",
            )
    source.copy(out / "bundle")
    copied = "\n".join(f"COPY bundle/{name} /opt/{name}" for name in REQUIREMENTS)
    installed = " ".join(f"-r /opt/{name}" for name in REQUIREMENTS)
    text = DOCKERFILE.format(copied=copied, installed=installed, user=USER, port=port)
    (out / "Dockerfile").write_text(text)
