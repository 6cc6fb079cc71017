"""Is what was written the user's model? Judged by other readers than ours, parameter by parameter.

Every later stage, the baseline included, starts from the copy that load wrote. A mistake in making
it (two tensors swapped, a wrong prefix) would therefore be compared with itself and never show.

Up to WHOLE bytes of float32, transformers loads the source whole, and every parameter is compared
with its own. Beyond that the source is judged in pieces, so that memory does not grow with depth:

 1. transformers loads the source as a model of its first two blocks, in the stored dtype: this
    proves which stored name belongs to which parameter, of everything but the later blocks;
 2. the later blocks must have been taken by the names of the second, but for the number;
 3. every written tensor equals, bit for bit, the one that the safetensors library reads from the
    source under that name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.reading import reading
from optimizer.load.providers import gguf_file
from optimizer.load.quantized.parts import QuantizedWeight
from optimizer.load.weights import Weights
from optimizer.model.checkpoint.checkpoint import Entry, Tensors
from optimizer.model.checkpoint.model import auto_class
from optimizer.recipe.schema import Model

WHOLE = 1_500_000_000  # bytes of float32 that may be held together
WEIGHTS = (".safetensors", ".bin", ".gguf")
NAMES = 200  # characters of the list of files, in a message
BLOCK = re.compile(r"\.(\d+)\.")


def check(
    folder: Path, section: Model, written: Mapping[str, Tensor], chosen: Weights | None = None
) -> None:
    """Compare `written` (names as in the model's state) with what other readers find in the
    source's own `folder`.

    chosen: where each came from; without it, or from other files than safetensors, the model is
    loaded whole. Raises OptimizeError naming the first parameter that is missing or differs: that
    is a fault here, not in the checkpoint.
    """
    if chosen is None or not in_pieces(chosen):
        _compare(_theirs(folder, section, torch.float32), written, folder, everything=True)
        return
    short = _theirs(folder, section, "auto", _two_blocks(folder, section))
    _compare(short, written, folder, everything=False)
    proven = {n for n, _ in short.named_parameters()} | {n for n, _ in short.named_buffers()}
    del short
    for name in written:
        source = chosen.chosen[name]
        if name not in proven:
            _check_name(name, source, chosen.chosen, proven)
        entry = chosen.stored[source]
        assert not isinstance(entry, QuantizedWeight)  # quantized.keep judges those
        theirs, ours = _by_library(entry, source), _stored(written, name)
        if not torch.equal(theirs.to(ours.dtype), ours):
            raise OptimizeError(
                f"{name} was written with other values than {source} has in the source",
                where=str(folder),
            )


def in_pieces(chosen: Weights) -> bool:
    """Whether the model is too large to be compared whole, and can be compared in pieces."""
    sizes = [4 * shape.numel() for shape in (torch.Size(s) for _, s in chosen.specs().values())]
    entries = all(isinstance(e, Entry) for e in chosen.stored.values())
    return entries and sum(sizes) > WHOLE


def kept(name: str) -> bool:
    """Whether the model of two blocks has this parameter."""
    number = BLOCK.search(name)
    return number is None or int(number[1]) < 2


def _theirs(folder: Path, section: Model, dtype: Any, config: Any = None) -> Any:
    extra = {} if config is None else {"config": config}
    names = sorted(f.name for f in folder.iterdir() if f.suffix in WEIGHTS)
    with reading(f"{folder}: {', '.join(names)[:NAMES]}"), quiet():
        if section.gguf_file is not None:
            from gguf import GGUFReader

            tensors = gguf_file.sizes(GGUFReader(folder / section.gguf_file))
            extra = gguf_file.arguments(section.gguf_file)
            extra["config"] = gguf_file.config_of(folder, section.gguf_file, tensors)
        return auto_class(section.task).from_pretrained(
            folder,
            attn_implementation="eager",
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=section.trust_remote_code,
            **extra,
        )


def _two_blocks(folder: Path, section: Model) -> Any:
    """The config of the source, cut to two blocks: also its lists with an item per block."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    layers = int(config.num_hidden_layers)
    cut = copy.deepcopy(config)
    for key, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(cut, key, value[:2])
    cut.num_hidden_layers = min(2, layers)
    return cut


def _compare(theirs: Any, written: Mapping[str, Tensor], folder: Path, everything: bool) -> None:
    """Each of `written` with theirs; everything: they must have all of it."""
    parameters = {
        **dict(theirs.named_buffers(remove_duplicate=False)),
        **dict(theirs.named_parameters(remove_duplicate=False)),
    }
    for name in written:
        if name not in parameters:
            if not everything:
                continue
            raise OptimizeError(
                f"{name} was written, and transformers reads no such parameter", where=str(folder)
            )
        ours, other = _stored(written, name), parameters[name].detach()
        if not torch.equal(other, ours.to(other.dtype)):
            raise OptimizeError(
                f"{name} was written with other values than transformers reads from the source",
                where=str(folder),
            )


def _stored(written: Mapping[str, Tensor], name: str) -> Tensor:
    """In the layout of the files, which is that of transformers' own parameters."""
    return written.stored(name) if isinstance(written, Tensors) else written[name]


def _by_library(entry: Entry | Tensor, name: str) -> Tensor:
    """Opened anew for each tensor, so that what was read before does not stay mapped."""
    from safetensors import safe_open

    assert isinstance(entry, Entry), "in_pieces saw to it"
    with safe_open(entry.file, "pt") as f:
        tensor: Tensor = f.get_tensor(name)
    return tensor


def _check_name(name: str, source: str, chosen: Mapping[str, str], proven: set[str]) -> None:
    """A parameter of a later block comes from the name that the second block's has, renumbered."""
    number = BLOCK.search(name)
    second = BLOCK.sub(".1.", name, count=1)
    if number is None or second not in proven or second not in chosen:
        raise OptimizeError(f"{name} is in no block that transformers reads", where=source)
    if BLOCK.sub(f".{number[1]}.", f".{chosen[second]}", count=1) != f".{source}":
        raise OptimizeError(f"{name} was taken from {source}, which is not its name", where=source)
