"""Pair the tensors of a source's weight files with the parameters of the task's model.

A checkpoint may have been saved from the base model ("encoder.…") or from one with a head
("bert.encoder.…"), and very old ones have LayerNorm.gamma and .beta. Parameters that are then
missing are searched under the names that transformers renames while loading (conversions.py). A
missing parameter is an error, never an initialization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation.errors import CheckpointError, suggest
from optimizer.harness import tasks
from optimizer.load import conversions
from optimizer.load.quantized import folder as quantized
from optimizer.load.quantized.parts import QuantizedWeight
from optimizer.load.source import shard_files
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.checkpoint import GET_AGAIN, TensorPlace, read_entry, read_header
from optimizer.model.checkpoint.model import (
    STORED_TRANSPOSED,
    find_tied_names,
    list_parameter_shapes,
)
from optimizer.recipe.schema import Model

PIECE = 1 << 22  # values checked at once
Stored = TensorPlace | Tensor | QuantizedWeight
NUMBER = re.compile(r"\.\d+\.")
HARMLESS = frozenset({"position_ids", "inv_freq", "masked_bias", "pooler"})
"""Parts of the names of tensors that many checkpoints carry beside the task's model: buffers that
newer versions of transformers compute, and the pooler, which RoBERTa's heads do not read."""
LEGACY = ((".gamma", ".weight"), (".beta", ".bias"))


@dataclass(frozen=True)
class SourceWeights:
    """The stored tensors of a source, paired with the model's parameters."""

    stored: Mapping[str, Stored]  # by name in the file
    source_names: Mapping[str, str]  # {parameter of the model: name in the file}
    unused: tuple[str, ...]  # names in the file without a parameter

    def read(self, parameter: str) -> Tensor:
        """Read the values of a parameter, to be written by load. Raises CheckpointError for NaN or
        infinity."""
        name = self.source_names[parameter]
        entry = self.stored[name]
        tensor = read_values(entry)
        where = "checkpoint" if isinstance(entry, Tensor) else str(entry.file)
        return _check_finite(name, tensor, where)

    def specs(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return {parameter: dtype and shape of `read(parameter)`}, from headers."""
        entries = {p: self.stored[n] for p, n in self.source_names.items()}
        return {p: (_written_dtype(x.dtype), tuple(x.shape)) for p, x in entries.items()}


def _written_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the float type in which load writes a tensor: that of the file, but float32 for
    float64, as transformers does; no target has float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def _all_finite(piece: Tensor) -> bool:
    """Test that a source's tensor has no NaN and infinity, by the extremes, which takes a tenth of
    the time of a mask."""
    return not piece.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(piece))).all())


def _check_finite(name: str, tensor: Tensor, where: str) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    pieces = tensor.reshape(-1).split(PIECE)  # the mask of an embedding at once would be large
    if not all(_all_finite(piece) for piece in pieces):
        bad = sum(piece.numel() - int(torch.isfinite(piece).sum()) for piece in pieces)
        raise CheckpointError(
            f"{bad} of {tensor.numel()} values of {name!r} are NaN or infinite",
            where=where,
            fix="The training diverged or the file was damaged: use another checkpoint.",
        )
    return tensor.to(_written_dtype(tensor.dtype))


def _check_one_set(folder: Path) -> None:
    """Raise CheckpointError for a folder with both model.safetensors and an index of other shards,
    because libraries differ in which of the two they read."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not (index.is_file() and single.is_file()):
        return
    shards = sorted({p.name for p in shard_files(folder, index).values()} - {single.name})
    if shards:
        listed = shards[0] if len(shards) == 1 else f"{shards[0]} to {shards[-1]}"
        raise CheckpointError(
            f"it has two sets of weights: {single.name}, and {listed}, which {index.name} lists",
            where=str(folder),
            accepted="one of them",
            fix=f"Remove the older: {single.name}, or {index.name} with its shards. transformers "
            f"reads {single.name}.",
        )


def find(folder: Path, section: Model) -> dict[str, Stored]:
    """Return {name in the files: stored tensor} of a checkpoint's folder.

    Raises CheckpointError for a folder without weights, or with two sets of them (one file, and an
    index of shards), for a missing shard or a damaged file, and for a pickle as the only file
    unless allow_pickle is set."""
    _check_one_set(folder)
    quantized_folder = quantized.find(folder)
    if quantized_folder is not None:
        return {**quantized_folder.stored}
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        stored: dict[str, Stored] = {}
        listed = shard_files(folder, index)
        headers = {shard: read_header(shard) for shard in sorted(set(listed.values()))}
        for name, shard in listed.items():
            if name not in headers[shard]:
                raise CheckpointError(
                    f"{name!r} is listed in {index.name} but not in the file",
                    where=str(shard),
                    fix=GET_AGAIN,
                )
            stored[name] = headers[shard][name]
        return stored
    if single.is_file():
        entries = read_header(single)
        if not entries:
            raise CheckpointError("it holds no tensors", where=str(single), fix=GET_AGAIN)
        return dict(entries)
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if pickled and not section.allow_pickle:
        raise CheckpointError(
            f"the weights are a pickle ({pickled[0].name}), which can run code when it is read",
            where=str(folder),
            accepted="model.safetensors",
            fix="Convert it, or set model.allow_pickle: true (it is then read as data only).",
        )
    if pickled:
        return dict(_read_pickles(pickled))
    others = sorted(p.name for p in folder.glob("*.safetensors"))
    raise CheckpointError(
        "no weights" + (f" (only {', '.join(others)})" if others else ""),
        where=str(folder),
        accepted="model.safetensors, or model.safetensors.index.json with its shards",
        fix="Finish the download, or give the folder that save_pretrained wrote.",
    )


def read_headers(folder: Path) -> dict[str, Stored]:
    """Return {name: tensor without its values} of a folder's files of weights; {} where they cannot
    be read, which `find` explains."""
    try:
        stored: dict[str, Stored] = {}
        for file in folder.glob("*.safetensors"):
            stored |= read_header(file)
        for file in () if stored else sorted(folder.glob("pytorch_model*.bin")):
            stored |= torch.load(file, map_location="meta", weights_only=True)
    except Exception:  # any of torch's errors for a bad pickle
        return {}
    return {str(name): tensor for name, tensor in stored.items()}


def is_only_pickled(folder: Path, section: Model) -> bool:
    """Return True for a source's weights that are pickles alone and that the recipe allows; they
    are read whole."""
    pickled = any(folder.glob("pytorch_model*.bin"))
    return section.allow_pickle and pickled and not any(folder.glob("*.safetensors"))


def _read_pickles(files: list[Path]) -> dict[str, Tensor]:
    """The tensors of pickled state dicts, through torch's restricted reader, which runs no code."""
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=False)
        except Exception as e:  # torch raises many types of errors for bad pickles
            raise CheckpointError(
                f"the pickle cannot be read as data ({str(e).splitlines()[0][:160]})",
                where=str(file),
                fix="Get the file again, or convert it to safetensors where you trust it.",
            ) from e
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise CheckpointError(
                "the pickle is not a state dict (names and tensors)", where=str(file)
            )
        tensors.update(loaded)
    return tensors


def match(stored: Mapping[str, Stored], model: nn.Module, section: Model) -> SourceWeights:
    """Pair every parameter of the skeleton `model` with a stored tensor, by name and shape.

    The files may hold either name of a tied parameter, or both with equal values. Raises
    CheckpointError naming parameters that are missing, of another shape, or tied with other values.
    """
    shapes, tied = list_parameter_shapes(model), find_tied_names(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    family = FAMILIES.get(str(getattr(getattr(model, "config", None), "model_type", "")))
    file_names: dict[str, str] = {}
    for name in stored:
        renamed = f".{name}"
        for old, new in family.stored_as if family else ():
            renamed = renamed.replace(old, new)
        renamed = renamed.removeprefix(".")
        for old, new in LEGACY:
            renamed = renamed.removesuffix(old) + new if renamed.endswith(old) else renamed
        for candidate in (name, renamed, renamed.removeprefix(prefix), prefix + renamed):
            if (candidate in shapes or candidate in tied) and candidate not in file_names:
                file_names[candidate] = name
                break
    repeated = _add_renamed(stored, file_names, {*shapes, *tied}, model)
    used = {*file_names.values(), *repeated}
    source_names = {p: n for p, n in file_names.items() if p in shapes}
    for second, first in tied.items():
        if second not in file_names:
            continue
        if first in file_names and not _equal(
            stored[file_names[first]], stored[file_names[second]]
        ):
            raise CheckpointError(
                f"config.json ties {second!r} to {first!r}, but the files hold different values",
                where="config.json: tie_word_embeddings",
                fix="Set it to false if the model was trained untied; else get the weights again.",
            )
        source_names.setdefault(first, file_names[second])
    _check_complete(stored, source_names, shapes, model, section)
    _check_kinds(stored, source_names, shapes, model)
    unused = tuple(sorted(n for n in stored if n not in used))
    _check_no_block_unused(stored, unused, used, model)
    return SourceWeights(stored, {p: source_names[p] for p in shapes}, unused)


def _add_renamed(
    stored: Mapping[str, Stored], file_names: dict[str, str], places: set[str], model: nn.Module
) -> set[str]:
    """Add to `file_names` the source's tensors that transformers renames to a parameter still
    without one. Returns the names of equal copies of them (a table stored once per block).
    """
    empty = places - file_names.keys()
    if not empty:
        return set()
    unused = sorted(stored.keys() - set(file_names.values()))
    repeated = set()
    for name, new in conversions.find_renamed(unused, model).items():
        place = _find_place(new, empty, model)
        if place is None:
            continue
        first = file_names.setdefault(place, name)
        if first != name and _equal(stored[first], stored[name]):
            repeated.add(name)
    return repeated


def _find_place(name: str, places: Collection[str], model: nn.Module) -> str | None:
    """Find the place in the model of a source's stored tensor: the name among `places` that equals
    `name` with or without the base model's prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    candidates = (name, name.removeprefix(prefix), prefix + name)
    return next((c for c in candidates if c in places), None)


def _check_no_block_unused(
    stored: Mapping[str, Stored], unused: tuple[str, ...], used: set[str], model: nn.Module
) -> None:
    """Raise CheckpointError for an unused tensor whose name differs from a used one only in the
    block's number, because config.json then has fewer blocks than the files. Blocks that
    transformers ignores too (multi-token prediction) are allowed."""
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    patterns = {NUMBER.sub(".*.", name) for name in used}
    for name in unused:
        if NUMBER.sub(".*.", name) in patterns and not any(re.search(i, name) for i in ignored):
            raise CheckpointError(
                f"{name!r} has no place in the model: config.json has fewer blocks than the files "
                f"({len(unused)} tensors would be left out)",
                where=_place(stored),
                fix="Set num_hidden_layers (or this architecture's name for it) in config.json to "
                "the number of trained blocks.",
            )


def find_useless(pairing: SourceWeights, model: nn.Module) -> list[str]:
    """List the source's tensors that the model has no place for, without those that transformers
    ignores by name too, and HARMLESS ones."""
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return [
        name
        for name in pairing.unused
        if not any(re.search(pattern, name) for pattern in ignored)
        and not HARMLESS & set(name.split("."))
    ]


def write_patterns(names: Collection[str], model: nn.Module) -> list[str]:
    """Write patterns for the recipe's model.ignore_tensors that match `names`: a head by its first
    word, a tensor inside the model by its name, because a pattern there would match others too."""
    return sorted({n if _is_inside(n, model) else f"{n.partition('.')[0]}.*" for n in names})


def _is_inside(name: str, model: nn.Module) -> bool:
    return name.startswith(f"{getattr(model, 'base_model_prefix', '')}.")


def check_unused(pairing: SourceWeights, model: nn.Module, section: Model) -> None:
    """Raise CheckpointError for tensors of find_useless that the recipe does not name, and for a
    pattern of the recipe that matches no tensor."""
    wrong = [
        name
        for name in find_useless(pairing, model)
        if not any(fnmatchcase(name, pattern) for pattern in section.ignore_tensors)
    ]
    for pattern in section.ignore_tensors:
        if not any(fnmatchcase(name, pattern) for name in pairing.unused):
            raise CheckpointError(
                f"{pattern!r} matches none of the tensors that task {section.task} has no use for",
                where="model.ignore_tensors",
                accepted=", ".join(pairing.unused[:4]) or "nothing: every tensor is used",
            )
    if wrong:
        some = ", ".join(wrong[:4]) + (", …" if len(wrong) > 4 else "")
        inside = [name for name in wrong if _is_inside(name, model)]
        patterns = ", ".join(map(json.dumps, write_patterns(wrong, model)[:4]))
        raise CheckpointError(
            f"task {section.task} has no use for {len(wrong)} of the checkpoint's tensors: {some}",
            where="config.json" if inside else "model.task",
            accepted="a checkpoint without further tensors",
            fix="config.json and the weights may be of different models: get both again; to leave "
            f"tensors out, name them in model.ignore_tensors, such as {json.dumps(inside[0])}."
            if inside
            else "Set model.task to that of the head that they belong to; to leave them out, set "
            f"model.ignore_tensors: [{patterns}].",
        )


def _place(stored: Mapping[str, Any]) -> str:
    """Return where tensors of a loaded checkpoint are stored, for messages of load: their file, or
    the folder of their files."""
    files = {str(entry.file) for entry in stored.values() if isinstance(entry, TensorPlace)}
    folders = {str(Path(file).parent) for file in files}
    return next(iter(files if len(files) == 1 else folders), "checkpoint")


def _equal(one: Stored, other: Stored) -> bool:
    return torch.equal(read_values(one), read_values(other))


def read_values(entry: Stored) -> Tensor:
    """Return the values of a stored tensor of a checkpoint: read from its file, de-quantized, or
    the entry itself."""
    if isinstance(entry, QuantizedWeight):
        return entry.dequantize()
    return read_entry(entry) if isinstance(entry, TensorPlace) else entry


def _check_kinds(
    stored: Mapping[str, Stored],
    source_names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    model: nn.Module,
) -> None:
    """Raise CheckpointError at load for a tensor of another shape than its parameter, or of
    integers."""
    floats = {name for name, _ in model.named_parameters()}
    transposed = {f"{n}.weight" for n, m in model.named_modules() if hasattr(m, STORED_TRANSPOSED)}
    for parameter, name in source_names.items():
        shape = tuple(stored[name].shape)
        expected = shapes[parameter][::-1] if parameter in transposed else shapes[parameter]
        if shape != expected:
            raise CheckpointError(
                f"{name!r} has the shape {shape}, but config.json makes it {expected}",
                where=_place(stored),
                fix="config.json and the weights are of different models: get both again.",
            )
        if parameter in floats and not stored[name].dtype.is_floating_point:
            raise CheckpointError(
                f"{name!r} is {stored[name].dtype}: the checkpoint is already quantized",
                where=_place(stored),
                fix="Use the float checkpoint it was made from.",
            )


def _check_complete(
    stored: Mapping[str, Any],
    source_names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    model: nn.Module,
    section: Model,
) -> None:
    missing = [n for n in shapes if n not in source_names]
    if not missing:
        return
    unused = [n for n in stored if n not in source_names.values()]
    counted = f"{len(missing)} of {len(shapes)} parameters are missing: {', '.join(missing[:4])}"
    counted += ", …" if len(missing) > 4 else ""
    parts = conversions.find_converted(unused, model)
    sources = [n for n, part in parts.items() if _find_place(part, missing, model) is not None]
    if sources:
        raise CheckpointError(
            f"{counted}; transformers computes them from {sources[0]!r} and others while loading, "
            "which is not supported here",
            where=_place(stored),
            fix="Load the model with transformers and save its parameters: "
            "model.save_pretrained(folder, save_original_format=False).",
        )
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    head = [n for n in missing if not n.startswith(prefix)]
    rest = [n for n in missing if n.startswith(prefix) and ".pooler." not in n]
    if not tasks.find_task(section.task).headless and head and not rest:
        raise CheckpointError(
            f"the checkpoint has no head for task {section.task}: {', '.join(head[:4])} missing; "
            "an initialized head would answer at random",
            where="model.task",
            fix="Use a checkpoint fine-tuned for this task, or task: feature-extraction.",
        )
    raise CheckpointError(
        f"{counted}{suggest(missing[0], unused)}",
        where=_place(stored),
        fix="Get the weights again, or check that config.json belongs to them.",
    )
