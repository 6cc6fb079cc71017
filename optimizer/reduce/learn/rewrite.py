"""Rewrite a checkpoint with new values of some tensors, in the layout of load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimizer.foundation import safetensors_stream
from optimizer.model.checkpoint.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"
BESIDE = ("contract.json", "source.json")


def rewrite(source: Path, values: Mapping[str, Tensor], out: Path) -> None:
    """Write the trained checkpoint: copy one to `out` with new values of some tensors, stored as
    float32 so that trained values are not rounded.

    source: folder of load
    values: {parameter: float32 values}; linear weights as (out, in)

    Raises KeyError for a name that the checkpoint lacks.
    """
    checkpoint = open_checkpoint(source)
    tensors = checkpoint.tensors
    unknown = sorted(values.keys() - set(tensors))
    if unknown:
        raise KeyError(unknown[0])
    folder = out / "checkpoint"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in sorted(checkpoint.folder.iterdir()):
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    for name in BESIDE:
        shutil.copyfile(source / name, out / name)
    config = {**checkpoint.config, "dtype": "float32"}
    config.pop("torch_dtype", None)  # the older name of dtype
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")

    def value(name: str) -> Tensor:
        if name in values:
            return tensors.as_stored(name, values[name].detach().float()).contiguous()
        return tensors.stored(name)

    specs = {
        name: (
            torch.float32 if name in values else tensors.entry(name).dtype,
            tensors.entry(name).shape,
        )
        for name in tensors
    }
    safetensors_stream.write_known(specs, value, folder / WEIGHTS)
