"""From a source's weight files to the parameters of the model the task chooses.

Names: a checkpoint may have been saved from the base model ("encoder.…") or from one with a head
("bert.encoder.…"), and very old ones say LayerNorm.gamma and .beta. Nothing else is renamed.
What the model needs and the files lack is an error, never an initialization.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.errors import CheckpointError, closest
from optimizer.load.checkpoint import GET_AGAIN, Entry, read_entry, read_header
from optimizer.load.model import HEADLESS, parameter_shapes
from optimizer.load.source import shard_files
from optimizer.recipe import Model

LEGACY = ((".gamma", ".weight"), (".beta", ".bias"))


@dataclass(frozen=True)
class Weights:
    """stored: {name in the file: entry}, or tensor when it came from a pickle.
    chosen: {parameter of the model: name in the file}. unused: names nothing asks for."""

    stored: Mapping[str, Entry | Tensor]
    chosen: Mapping[str, str]
    unused: tuple[str, ...]

    def entries(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter, tensor) one at a time. Raises CheckpointError for NaN or infinity."""
        for parameter, name in self.chosen.items():
            found = self.stored[name]
            tensor = read_entry(found) if isinstance(found, Entry) else found
            where = str(found.file) if isinstance(found, Entry) else "pytorch_model.bin"
            yield parameter, _finite(name, tensor, where)


def _finite(name: str, tensor: Tensor, where: str) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise CheckpointError(
            f"{bad} of {tensor.numel()} values of {name!r} are NaN or infinite",
            where=where,
            fix="The training diverged or the file was damaged: use another checkpoint.",
        )
    # float64 has no place in any target; transformers loads it as float32 too
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def find(folder: Path, section: Model) -> dict[str, Entry | Tensor]:
    """Every stored tensor by its name in the files. Raises CheckpointError: no weights, a missing
    shard, a damaged file, or only a pickle without allow_pickle."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        stored: dict[str, Entry | Tensor] = {}
        listed = shard_files(folder, index)
        headers = {shard: read_header(shard) for shard in sorted(set(listed.values()))}
        for name, shard in listed.items():
            if name not in headers[shard]:
                raise CheckpointError(
                    f"{name!r} is listed in {index.name} and not in the file",
                    where=str(shard),
                    fix=GET_AGAIN,
                )
            stored[name] = headers[shard][name]
        return stored
    if single.is_file():
        return dict(read_header(single))
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled and not section.allow_pickle:
        raise CheckpointError(
            f"the weights are a pickle ({pickled[0].name}), which can run code when it is read",
            where=str(folder),
            accepted="model.safetensors",
            fix="Convert it, or set model.allow_pickle: true (it is then read as data only).",
        )
    if pickled:
        return dict(_pickled(pickled))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    raise CheckpointError(
        "no weights" + (f" (there is {', '.join(others)})" if others else ""),
        where=str(folder),
        accepted="model.safetensors, or model.safetensors.index.json with its shards",
        fix="Finish the download, or give the folder that save_pretrained wrote.",
    )


def _pickled(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of pickled state dicts; torch's restricted reader runs no code."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        except Exception as e:  # torch raises a different kind for each way a pickle can be bad
            raise CheckpointError(
                f"the pickle cannot be read as data ({str(e).splitlines()[0][:160]})",
                where=str(file),
                fix="Get the file again, or convert it to safetensors where you trust it.",
            ) from e
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise CheckpointError(
                "the pickle is no state dict (names and tensors)", where=str(file)
            )
        tensors.update(loaded)
    return tensors


def match(stored: Mapping[str, Entry | Tensor], model: nn.Module, section: Model) -> Weights:
    """Pair every parameter of the skeleton with a stored tensor, by name and shape.

    Raises CheckpointError naming the parameters that are missing or of another shape.
    """
    wanted = parameter_shapes(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    chosen: dict[str, str] = {}
    for name in stored:
        renamed = name
        for old, new in LEGACY:
            renamed = renamed.removesuffix(old) + new if renamed.endswith(old) else renamed
        for candidate in (name, renamed, renamed.removeprefix(prefix), prefix + renamed):
            if candidate in wanted and candidate not in chosen:
                chosen[candidate] = name
                break
    _complete(stored, chosen, wanted, model, section)
    floats = {name for name, _ in model.named_parameters()}
    for parameter, name in chosen.items():
        shape = tuple(stored[name].shape)
        if shape != wanted[parameter]:
            raise CheckpointError(
                f"{name!r} is {shape}, and config.json makes it {wanted[parameter]}",
                where="checkpoint",
                fix="config.json and the weights are of different models: get both again.",
            )
        if parameter in floats and not stored[name].dtype.is_floating_point:
            raise CheckpointError(
                f"{name!r} is {stored[name].dtype}: the checkpoint is already quantized",
                where="checkpoint",
                fix="Use the float checkpoint it was made from.",
            )
    used = set(chosen.values())
    return Weights(
        stored, {p: chosen[p] for p in wanted}, tuple(sorted(n for n in stored if n not in used))
    )


def _complete(
    stored: Mapping[str, Any],
    chosen: Mapping[str, str],
    wanted: Mapping[str, tuple[int, ...]],
    model: nn.Module,
    section: Model,
) -> None:
    missing = [n for n in wanted if n not in chosen]
    if not missing:
        return
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    head = [n for n in missing if not n.startswith(prefix)]
    rest = [n for n in missing if n.startswith(prefix) and ".pooler." not in n]
    if section.task not in HEADLESS and head and not rest:
        raise CheckpointError(
            f"the checkpoint has no head for task {section.task}: {', '.join(head[:4])} missing; a "
            "made-up head would answer at random",
            where="model.task",
            fix="Use a checkpoint fine-tuned for this task, or task: feature-extraction.",
        )
    unused = [n for n in stored if n not in chosen.values()]
    raise CheckpointError(
        f"{len(missing)} of {len(wanted)} parameters are missing: {', '.join(missing[:4])}"
        f"{', …' if len(missing) > 4 else ''}{closest(missing[0], unused)}",
        where="checkpoint",
        fix="Get the weights again, or check that config.json belongs to them.",
    )
