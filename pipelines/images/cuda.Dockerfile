# The toolchain for NVIDIA GPUs. The context is the repository; it has not been built by this project:
#   buildah bud -f pipelines/images/cuda.Dockerfile -t optimize-toolchain:cuda .
#   docker run --rm --gpus all optimize-toolchain:cuda optimize doctor
# BASE: an Ubuntu or Debian with CUDA's driver libraries in reach. torch from PyPI brings CUDA's own.
ARG BASE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04
FROM ${BASE}
ARG PIP_OPTIONS=""
ARG EXTRAS=gpu,rtx,tensorrt,gguf,compressed-tensors,sign,seal
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv ca-certificates \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/optimize
COPY constraints.txt ./
RUN python3 -m venv /opt/venv \
    && python -m pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt torch
COPY pyproject.toml README.md ./
COPY optimizer optimizer
RUN python -m pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt ".[${EXTRAS}]" \
    && mkdir -p /work && chmod 1777 /work
ENV HOME=/work
WORKDIR /work
USER 65534:65534
CMD ["optimize", "doctor"]
