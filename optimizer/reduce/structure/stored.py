"""Map the tensors of a safetensors file, reading one on each access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class StoredTensors(Mapping[str, Tensor]):
    """Tensors that a step of reduce stored in a safetensors file, each read when it is used.

    names: names of the tensors
    start: beginning of the names in the file, before those of `names`
    """

    file: Path
    names: tuple[str, ...]
    start: str = ""

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.names:
            raise KeyError(name)
        with safe_open(self.file, "pt") as f:
            tensor: Tensor = f.get_tensor(f"{self.start}{name}").clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def stored(file: Path) -> StoredTensors:
    """Open a safetensors file that a step of reduce stored as a mapping from all of its names to
    tensors, each read when it is used."""
    with safe_open(file, "pt") as f:
        return StoredTensors(file, tuple(f.keys()))
