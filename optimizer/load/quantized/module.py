"""Module of a quantized checkpoint: checks its tensors against each other, makes a QTensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import QTensor, Scheme, divides, is_on_scale_grid
from optimizer.load.quantized.parts import FLOAT_INSTEAD
from optimizer.model.checkpoint.checkpoint import GET_AGAIN, TensorPlace, read_entry

SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class QuantizedModule:
    """A module of a quantized checkpoint, e.g. a linear layer, with its packed tensors."""

    name: str
    tensors: Mapping[str, TensorPlace]  # by the last part of their names

    @property
    def where(self) -> str:
        return f"{next(iter(self.tensors.values())).file}: {self.name}"

    def wrong(
        self, problem: str, *, accepted: str = "", fix: str = FLOAT_INSTEAD
    ) -> CheckpointError:
        return CheckpointError(problem, where=self.where, accepted=accepted, fix=fix)

    def entry(self, name: str, *dtypes: torch.dtype) -> TensorPlace:
        """Return the place of the module's tensor `name` in its file. Raises CheckpointError where
        it is missing or not in `dtypes`."""
        if name not in self.tensors:
            have = ", ".join(sorted(self.tensors))
            raise self.wrong(f"{name} is missing (it has {have})", fix=GET_AGAIN)
        entry = self.tensors[name]
        if dtypes and entry.dtype not in dtypes:
            raise self.wrong(f"{name} is {entry.dtype}", accepted=", ".join(str(d) for d in dtypes))
        return entry

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise CheckpointError when the quantized checkpoint's tensor `name` does not have this
        shape."""
        actual = self.tensors[name].shape
        if actual != shape:
            raise self.wrong(f"{name} is {actual}; the other tensors need {shape}", fix=GET_AGAIN)

    def tensor(self, name: str) -> Tensor:
        return read_entry(self.tensors[name])

    def qtensor(
        self, integers: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme
    ) -> QTensor:
        """Build the weight of a quantized checkpoint's module as QTensor. Raises CheckpointError
        for a scale that no 16-bit target holds."""
        scale = scale.float().contiguous()
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise self.wrong("a scale is zero, negative, NaN or infinite")
        if not is_on_scale_grid(scale):
            raise self.wrong(
                "its float32 scales have more digits than 16-bit targets hold",
                accepted="scales that are float16 values, or bfloat16 values",
                fix="Quantize again from the float checkpoint.",
            )
        try:
            return QTensor(integers.contiguous(), scale, zero_point, scheme)
        except ValueError as e:
            raise self.wrong(str(e)) from None


def find_modules(
    entries: Mapping[str, TensorPlace], mark: str, parts: tuple[str, ...]
) -> dict[str, QuantizedModule]:
    """Find the modules of a quantized checkpoint that is loaded: {name: module} for each tensor
    `<name>.<mark>`, with the tensors `<name>.<part>`."""
    names = sorted(n.removesuffix(f".{mark}") for n in entries if n.endswith(f".{mark}"))
    return {
        name: QuantizedModule(
            name, {p: entries[f"{name}.{p}"] for p in parts if f"{name}.{p}" in entries}
        )
        for name in names
    }


def select_other_entries(
    entries: Mapping[str, TensorPlace], taken: Mapping[str, QuantizedModule]
) -> dict[str, TensorPlace]:
    """Select the stored tensors that belong to no quantized module of `taken`."""
    used = {f"{m.name}.{part}" for m in taken.values() for part in m.tensors}
    return {name: entry for name, entry in entries.items() if name not in used}


def check_grouping(
    module: QuantizedModule, inputs: int, groups: int, group_size: int | None
) -> tuple[str, int | None]:
    """Check the groups of a quantized checkpoint that is loaded: return ("group", inputs per group)
    or ("channel", None), for `groups` scales per row. group_size: the config's, -1 for one group,
    None for unknown. Raises CheckpointError for another size.
    """
    if not divides(groups, inputs):
        raise module.wrong(
            f"{groups} groups do not divide {inputs} inputs evenly",
            accepted="groups of one size",
        )
    size = inputs // groups
    if group_size is not None and size != (inputs if group_size == -1 else group_size):
        raise module.wrong(
            f"the config has group_size {group_size}, but the scales belong to groups of {size}",
            fix="config.json and the weights are of different models: get both again.",
        )
    return ("group", size) if groups > 1 or group_size == size else ("channel", None)


def to_signed(unsigned: Tensor, bits: int) -> Tensor:
    """Convert a quantized checkpoint's unsigned integers 0..2**bits - 1 to int8 by subtracting
    2**(bits - 1)."""
    return (unsigned.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def number(config: Mapping[str, Any], *names: str, default: int) -> int:
    """Read a number of a loaded checkpoint's quantization config, under the first of `names` that
    it has, as int; `default` without any."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    return default
