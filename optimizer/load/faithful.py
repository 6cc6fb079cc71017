"""Compare the written checkpoint with the source, parameter by parameter, through other readers.

Every later stage, the baseline included, starts from the copy that load wrote, so none of them
could detect a mistake in it (two tensors swapped, a wrong prefix).

A model of up to IN_MEMORY bytes of float32 is loaded by transformers and compared at once. A larger
one is compared in pieces, so that memory does not grow with depth:

 1. transformers loads the first two blocks in the stored dtype, from mapped files, which proves
    the names of all parameters outside the later blocks;
 2. later blocks must come from the names of the second block, apart from the number;
 3. every written tensor equals, bit for bit, the one that the safetensors library reads from the
    source under that name.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import reading
from optimizer.load.providers import gguf_file, gguf_header
from optimizer.load.quantized.parts import QuantizedWeight
from optimizer.load.weights import SourceWeights
from optimizer.model.architectures.family_record import BLOCK
from optimizer.model.checkpoint.checkpoint import TensorPlace, Tensors, read_json
from optimizer.model.checkpoint.model import build_skeleton_from_config, choose_auto_class
from optimizer.recipe.schema import Model

IN_MEMORY = 600_000_000  # maximum bytes of float32 of a model that is loaded at once
WEIGHTS = (".safetensors", ".bin", ".gguf")
NAMES = 200  # maximum characters of the list of files in a message


def check(
    folder: Path,
    section: Model,
    written: Mapping[str, Tensor],
    pairing: SourceWeights | None = None,
    computed: Collection[str] = (),
) -> None:
    """Raise OptimizeError naming the first parameter that is missing or differs; that is a fault
    of load, not of the checkpoint.

    folder: the source's files
    written: {parameter: tensor} that load wrote
    pairing: the stored tensor of each parameter; without it, or with files other than safetensors,
        the model is compared at once
    computed: parameters that are not the source's, which are not compared
    """
    if pairing is None or not in_pieces(pairing):
        source = _load_source(folder, section, torch.float32)
        _compare(source, written, folder, everything=True, computed=computed)
        return
    short = _load_two_blocks(folder, section, pairing)
    _compare(short, written, folder, everything=False, computed=computed)
    proven = {n for n, _ in short.named_parameters()} | {n for n, _ in short.named_buffers()}
    del short
    for name in (n for n in written if n not in computed):
        source = pairing.source_names[name]
        if name not in proven:
            _check_name(name, source, pairing.source_names, proven)
        entry = pairing.stored[source]
        assert not isinstance(entry, QuantizedWeight)  # quantized/folder.py compares those weights
        if _same_file(entry, written, name):
            continue
        reference, ours = _read_by_library(entry, source), _as_stored(written, name)
        if not torch.equal(reference.to(ours.dtype), ours):
            raise OptimizeError(
                f"{name} was written with other values than {source} has in the source",
                where=str(folder),
            )


def in_pieces(pairing: SourceWeights) -> bool:
    """Return True for a model that load compares with its library in two blocks, because it is too
    large in one piece: above IN_MEMORY bytes in float32, and stored as safetensors that are not
    quantized."""
    sizes = [4 * shape.numel() for shape in (torch.Size(s) for _, s in pairing.specs().values())]
    entries = all(isinstance(e, TensorPlace) for e in pairing.stored.values())
    return entries and sum(sizes) > IN_MEMORY


def is_in_two_blocks(name: str) -> bool:
    """Return True for a parameter that load compares in a model cut short: in the first two blocks
    or outside all blocks."""
    number = BLOCK.search(name)
    return number is None or int(number[1]) < 2


def _load_source(folder: Path, section: Model, dtype: Any) -> Any:
    """Load the source's whole model by transformers, with its parameters in `dtype`."""
    extra: dict[str, Any] = {}
    names = sorted(f.name for f in folder.iterdir() if f.suffix in WEIGHTS)
    with reading(f"{folder}: {', '.join(names)[:NAMES]}"), quiet():
        if section.gguf_file is not None:
            tensors = gguf_header.read(folder / section.gguf_file).tensors
            extra = gguf_file.make_arguments(section.gguf_file)
            extra["config"] = gguf_file.read_config(folder, section.gguf_file, tensors)
        config = extra.get("config")
        kind = config.model_type if config else read_json(folder / "config.json").get("model_type")
        return choose_auto_class(section.task, kind).from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            **extra,
        )


def _load_two_blocks(folder: Path, section: Model, pairing: SourceWeights) -> Any:
    """Load for comparison the source's model cut to two blocks. Its parameters are views of the
    mapped files."""
    entries = ((n, e) for n, e in pairing.stored.items() if isinstance(e, TensorPlace))
    stored = {name: entry for name, entry in entries if is_in_two_blocks(name)}
    largest = max(stored.values(), key=lambda e: prod(e.shape))
    tensors = {name: _read_by_library(entry, name) for name, entry in stored.items()}
    config = _two_blocks(folder, section)
    kind: Any = type(build_skeleton_from_config(config, section.task, section.trust_remote_code))
    with reading(folder), quiet():
        return kind.from_pretrained(
            None,
            config=config,
            state_dict=tensors,
            dtype=largest.dtype,
            attn_implementation="eager",
        )


def _two_blocks(folder: Path, section: Model) -> Any:
    """The source's config cut to two blocks, its lists with an item per block included."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    layers = int(config.num_hidden_layers)
    cut = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(cut, key, value[:2])
    cut.num_hidden_layers = min(2, layers)
    return cut


def _compare(
    reference: Any,
    written: Mapping[str, Tensor],
    folder: Path,
    everything: bool,
    computed: Collection[str] = (),
) -> None:
    """Compare what load wrote: raise OptimizeError where a tensor of `written` differs from the
    torch model `reference`, or, if `everything`, where the model has no such parameter; else
    tensors it lacks are skipped."""
    parameters = {
        **dict(reference.named_buffers(remove_duplicate=False)),
        **dict(reference.named_parameters(remove_duplicate=False)),
    }
    for name in written:
        if name in computed:
            continue
        if name not in parameters:
            if not everything:
                continue
            raise OptimizeError(
                f"{name} was written, but transformers has no such parameter", where=str(folder)
            )
        ours, other = _as_stored(written, name), parameters[name].detach()
        if not torch.equal(other, ours.to(other.dtype)):
            raise OptimizeError(
                f"{name} was written with other values than transformers reads from the source",
                where=str(folder),
            )


def _as_stored(written: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a loaded tensor, to be compared with transformers', in the layout of the source's
    files, in which transformers' parameters are."""
    return written.stored(name) if isinstance(written, Tensors) else written[name]


def _same_file(entry: TensorPlace | Tensor, written: Mapping[str, Tensor], name: str) -> bool:
    """Return True where load linked the source's file instead of copying it (linked.py), so that
    its values need no comparison."""
    if not isinstance(entry, TensorPlace) or not isinstance(written, Tensors):
        return False
    ours = written.entry(name)
    return entry.begin == ours.begin and entry.file.samefile(ours.file)


def _read_by_library(entry: TensorPlace | Tensor, name: str) -> Tensor:
    """Read one tensor of the source by the safetensors library, for comparison; opening its file
    for each keeps earlier tensors from staying mapped."""
    from safetensors import safe_open

    assert isinstance(entry, TensorPlace), "in_pieces saw to it"
    with safe_open(entry.file, "pt") as f:
        tensor: Tensor = f.get_tensor(name)
    return tensor


def _check_name(name: str, source: str, source_names: Mapping[str, str], proven: set[str]) -> None:
    """Check load's pairing: raise OptimizeError unless `source`, the tensor that parameter `name`
    was read from, is named as the second block's, renumbered. proven: parameters that transformers
    itself loaded."""
    number = BLOCK.search(name)
    second = BLOCK.sub(".1.", name, count=1)
    if number is None or second not in proven or second not in source_names:
        raise OptimizeError(f"{name} is not in a block that transformers reads", where=source)
    if BLOCK.sub(f".{number[1]}.", f".{source_names[second]}", count=1) != f".{source}":
        raise OptimizeError(f"{name} was taken from {source}, which is not its name", where=source)
