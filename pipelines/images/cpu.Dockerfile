# The toolchain for CPUs, as the templates beside this folder use it. The context is the repository:
#   buildah bud -f pipelines/images/cpu.Dockerfile -t optimize-toolchain:latest .
# BASE: an image with Python 3.11 or newer, venv and pip. TORCH_OPTIONS: where pip finds torch without
# CUDA. PIP_OPTIONS: an index of one's own, or --no-index --find-links.
ARG BASE=docker.io/library/python:3.12-slim
FROM ${BASE}
ARG TORCH_OPTIONS="--index-url https://download.pytorch.org/whl/cpu"
ARG PIP_OPTIONS=""
ARG EXTRAS=cpu,gguf,compressed-tensors,genai,sign,seal
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
WORKDIR /opt/optimize
COPY constraints.txt ./
RUN python3 -m venv /opt/venv \
    && python -m pip install --no-cache-dir ${TORCH_OPTIONS} -c constraints.txt torch
COPY pyproject.toml README.md ./
COPY optimizer optimizer
RUN python -m pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt ".[${EXTRAS}]" \
    && mkdir -p /work && chmod 1777 /work
ENV HOME=/work
WORKDIR /work
USER 65534:65534
CMD ["optimize", "doctor"]
