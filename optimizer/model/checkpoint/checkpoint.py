"""Open a checkpoint on disk, read-only: its config, and its tensors one by one.

The safetensors format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length n
of the header, n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} with an optional
"__metadata__", then the data the offsets point into. Files are read without a memory map, so that
nothing stays mapped after a tensor was read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation import reading
from optimizer.foundation.errors import CheckpointError
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.residual_blocks import BatchNorms
from optimizer.model.checkpoint.batch_norms import PARTS, fold

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn}
MAX_HEADER = 50_000_000  # bytes: 500 for each of MAX_TENSORS
MAX_TENSORS = 100_000  # per file; 256 experts in 60 blocks have this number, in 100 files or more
AXES = 8  # maximum of a tensor; a convolution's weight has 5
GET_AGAIN = "Get the file again: the download was cut short or the file was changed."


@dataclass(frozen=True)
class TensorPlace:
    """Place of a checkpoint's tensor in a safetensors file: file, offsets, dtype and shape."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # first byte in `file`
    end: int


def read_header(file: Path, *, float8: bool = False) -> dict[str, TensorPlace]:
    """Return {name: entry} of a safetensors file, without reading any tensor.

    float8: True: accept FP8 tensors, whose values need scales from other tensors

    Raises CheckpointError for a corrupt header, an offset outside the file, or bytes that do not
    match dtype and shape.
    """
    dtypes = DTYPES | FLOAT8 if float8 else DTYPES
    size = reading.check_regular(file)
    with reading.reading(file, fix=GET_AGAIN), file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise CheckpointError(
                f"the file has {size} bytes and declares a header of {length}, so the header is "
                "corrupt or the file is cut off",
                where=str(file),
                fix=GET_AGAIN,
            )
        raw = f.read(length)
    objects = raw.count(b"{")  # one for each tensor; a million cost 12 s and 0.9 GB to parse
    if objects > MAX_TENSORS:
        raise CheckpointError(
            f"its header has {objects:,} objects",
            where=str(file),
            accepted=f"up to {MAX_TENSORS:,} tensors in a file",
            fix="Save the model in several files (max_shard_size of save_pretrained).",
        )
    try:
        document = json.loads(raw)
        metadata = document.get("__metadata__", {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ has a value that is not a string")
        items = [(n, e) for n, e in document.items() if n != "__metadata__"]
        entries = {n: _entry(file, n, e, 8 + length, size, dtypes) for n, e in items}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(
            f"the safetensors header is corrupt ({reading.quote_error(e)})",
            where=str(file),
            fix=GET_AGAIN,
        ) from e
    return entries


def _entry(
    file: Path,
    name: str,
    e: dict[str, Any],
    data: int,
    size: int,
    dtypes: Mapping[str, torch.dtype],
) -> TensorPlace:
    """Build the place of a stored tensor from its fields in a header.

    e: dtype, shape and data_offsets, as the header states them
    data: offset of the first tensor's bytes in the file
    size: bytes of the file
    dtypes: accepted names of dtypes

    Raises CheckpointError for another dtype and for bytes beyond the end of the file, ValueError
    for offsets that contradict the shape.
    """
    if not isinstance(e["dtype"], str) or e["dtype"] not in dtypes:
        raise CheckpointError(
            f"tensor {name!r} has dtype {e['dtype']!r}",
            where=str(file),
            accepted=", ".join(dtypes),
            fix="Use the float checkpoint this one was quantized from.",
        )
    dtype = dtypes[e["dtype"]]
    shape, offsets = tuple(e["shape"]), tuple(e["data_offsets"])
    if any(type(n) is not int for n in (*shape, *offsets)) or len(shape) > AXES:
        raise ValueError(f"tensor {name[:80]!r}: shape and offsets must be few whole numbers")
    begin, end = offsets
    if data + end > size:
        raise CheckpointError(
            f"tensor {name!r} ends at byte {data + end} but the file has {size} bytes",
            where=str(file),
            fix=GET_AGAIN,
        )
    if (
        not 0 <= begin <= end
        or end - begin != prod(shape) * dtype.itemsize
        or min(shape, default=0) < 0
    ):
        raise ValueError(
            f"tensor {name!r}: offsets {begin}..{end} do not hold {e['dtype']} {shape}"
        )
    return TensorPlace(file, dtype, shape, data + begin, data + end)


def read_entry(entry: TensorPlace) -> Tensor:
    """Read the checkpoint's tensor at `entry` as stored, into new memory."""
    raw = bytearray(entry.end - entry.begin)
    with entry.file.open("rb") as f:
        f.seek(entry.begin)
        f.readinto(raw)
    if not raw:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(raw, dtype=entry.dtype).reshape(entry.shape)


class Tensors(Mapping[str, Tensor]):
    """Mapping from a checkpoint's parameter names to tensors, read from disk on every access;
    floats become float32.

    transposed: names of weights that the files hold as (in, out), such as GPT-2's, and that are
        returned as (out, in)
    """

    def __init__(self, entries: Mapping[str, TensorPlace], transposed: Iterable[str] = ()) -> None:
        self._entries = dict(entries)
        self._transposed = frozenset(transposed)

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.as_stored(name, read_entry(self._entries[name])).contiguous()
        return tensor.float() if tensor.is_floating_point() else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of `self[name]`, from the header alone."""
        shape = self._entries[name].shape
        return shape[::-1] if name in self._transposed else shape

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Read rows `ids` of a matrix: `self[name][ids]`, of shape (*ids.shape, columns).

        ids: row numbers, of any shape

        Raises IndexError for an id out of range, ValueError for a tensor that is not stored by
        rows.
        """
        entry = self._entries[name]
        if len(entry.shape) != 2 or name in self._transposed:
            raise ValueError(f"{name} is not a matrix stored by rows: {entry.shape}")
        unique, places = torch.unique(ids.reshape(-1), return_inverse=True)
        if unique.numel() and not 0 <= int(unique[0]) <= int(unique[-1]) < entry.shape[0]:
            raise IndexError(
                f"{name} has {entry.shape[0]} rows, not {int(unique[0])}..{int(unique[-1])}"
            )
        size = entry.shape[1] * entry.dtype.itemsize
        raw = bytearray(len(unique) * size)
        view = memoryview(raw)
        numbers = unique.tolist()
        runs = [i for i, row in enumerate(numbers) if not i or row != numbers[i - 1] + 1]
        with entry.file.open("rb") as f:
            for start, stop in pairwise([*runs, len(numbers)]):
                f.seek(entry.begin + numbers[start] * size)
                f.readinto(view[start * size : stop * size])
        if not raw:
            return torch.empty((*ids.shape, entry.shape[1]))
        table = torch.frombuffer(raw, dtype=entry.dtype).reshape(len(unique), entry.shape[1])
        return table.float()[places].reshape(*ids.shape, entry.shape[1])

    def stored(self, name: str) -> Tensor:
        """Read a checkpoint's tensor with the dtype and layout that it has in its file."""
        return read_entry(self._entries[name])

    def as_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Convert `tensor` between the layout of self[name] and that of the file, in either
        direction: transposed, without a copy, where the file holds (in, out); else unchanged."""
        return tensor.t() if name in self._transposed else tensor

    @property
    def as_written(self) -> Tensors:
        """Return the checkpoint's tensors as the files hold them, without norms folded into
        convolutions."""
        return Tensors(self._entries, self._transposed)

    @property
    def computed(self) -> frozenset[str]:
        """Names of tensors whose values are computed from several tensors of the files."""
        return frozenset()

    def entry(self, name: str) -> TensorPlace:
        """Return the place of a checkpoint's tensor in its file."""
        return self._entries[name]


class FoldedTensors(Tensors):
    """Tensors of a checkpoint with norms folded into convolutions: the norms' tensors are missing,
    and the folded convolutions have a bias."""

    def __init__(
        self, entries: Mapping[str, TensorPlace], transposed: Iterable[str], norms: BatchNorms
    ) -> None:
        super().__init__(entries, transposed)
        self._epsilon = norms.epsilon
        self._norm_of = {}  # {convolution: its norm}
        for pair in norms.pairs:
            last = f".{pair.norm}.running_var"
            for name in (n for n in entries if n.endswith(last)):
                convolution = f"{name.removesuffix(last)}.{pair.convolution}"
                if f"{convolution}.weight" in entries:
                    self._norm_of[convolution] = name.removesuffix(".running_var")
        removed = {f"{norm}.{part}" for norm in self._norm_of.values() for part in PARTS}
        biases = [f"{convolution}.bias" for convolution in self._norm_of]
        self._names = dict.fromkeys([*(n for n in entries if n not in removed), *biases])

    @property
    def computed(self) -> frozenset[str]:
        return frozenset(f"{c}.{part}" for c in self._norm_of for part in ("weight", "bias"))

    def __getitem__(self, name: str) -> Tensor:
        convolution, _, part = name.rpartition(".")
        norm = self._norm_of.get(convolution)
        if norm is None:
            return super().__getitem__(name)
        bias_name = f"{convolution}.bias"
        weight, bias = fold(
            super().__getitem__(f"{convolution}.weight"),
            super().__getitem__(bias_name) if bias_name in self._entries else None,
            {p: super(FoldedTensors, self).__getitem__(f"{norm}.{p}") for p in PARTS[:4]},
            self._epsilon,
        )
        return {"weight": weight, "bias": bias}[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name in self._entries:
            return super().shape(name)
        return super().shape(name.removesuffix("bias") + "weight")[:1]


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint in the layout that stage load writes: its config and its tensors."""

    folder: Path  # config.json, *.safetensors and tokenizer files
    config: dict[str, Any]
    tensors: Tensors  # under the parameter names of the task's transformers model

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a checkpoint's tensor, from the header alone."""
        return self.tensors.shape(name)


def open_checkpoint(load_folder: Path) -> Checkpoint:
    """Open the load stage's folder. Raises CheckpointError when a file is missing or damaged."""
    folder = load_folder / "checkpoint"
    config = read_json(folder / "config.json")
    entries: dict[str, TensorPlace] = {}
    for file in sorted(folder.glob("*.safetensors")):
        entries.update(read_header(file))
    if not entries:
        raise CheckpointError(
            "no *.safetensors file", where=str(folder), fix="Run the load stage again."
        )
    family = FAMILIES.get(str(config.get("model_type")))
    transposed = [n for n in entries if family is not None and family.is_transposed(n)]
    if family is not None and family.batch_norms is not None:
        norms = family.batch_norms.with_config(config)
        return Checkpoint(folder, config, FoldedTensors(entries, transposed, norms))
    return Checkpoint(folder, config, Tensors(entries, transposed))


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in `file` of a checkpoint. Raises CheckpointError for a missing file
    or other content."""
    if not file.exists() and not file.is_symlink():
        raise CheckpointError(
            f"no {file.name}",
            where=str(file.parent),
            fix="Use the folder that save_pretrained wrote, or name one inside in model.subfolder.",
        )
    document = reading.read_json(file, fix=GET_AGAIN)
    if not isinstance(document, dict):
        raise CheckpointError("it is not a JSON object", where=str(file), fix=GET_AGAIN)
    return document
