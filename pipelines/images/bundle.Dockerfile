# A bundle and what its requirements.txt names, nothing of the toolchain. The context is its folder:
#   buildah bud -f pipelines/images/bundle.Dockerfile -t minilm:1 artifacts/minilm-int8/1
#   docker run --rm minilm:1 predict "what a lovely film"
# BASE: an image with Python 3.11 or newer, venv and pip; for engines, one with NVIDIA's libraries.
# PIP_OPTIONS: an index of one's own, or --no-index --find-links for a site without a network.
ARG BASE=docker.io/library/python:3.12-slim
FROM ${BASE}
ARG PIP_OPTIONS=""
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/venv/bin:$PATH
COPY requirements.txt /opt/requirements.txt
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/python -m pip install --no-cache-dir ${PIP_OPTIONS} -r /opt/requirements.txt
COPY . /bundle
WORKDIR /bundle
RUN python -m harness check
USER 65534:65534
ENTRYPOINT ["python", "-m", "harness"]
CMD ["check"]
