"""Torch functions for the ONNX operators that move values, create them or read shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Inputs = Sequence[Any]
Attributes = Mapping[str, Any]

DTYPES: Mapping[int, torch.dtype] = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}
"""{number of a type in ONNX's TensorProto: torch's type}."""


def value(inputs: Inputs, at: int) -> Any:
    """Return input number `at` of an ONNX operator that is computed in torch; None where the graph
    leaves it out."""
    return inputs[at] if at < len(inputs) else None


def integers(inputs: Inputs, at: int) -> list[int] | None:
    """Return input number `at` of an ONNX operator that is computed in torch as a list of integers;
    None where the graph leaves it out."""
    whole = value(inputs, at)
    return None if whole is None else [int(n) for n in whole.reshape(-1).tolist()]


def _reshape(x: Inputs, a: Attributes) -> Tensor:
    shape = integers(x, 1) or []
    if not a.get("allowzero"):
        shape = [x[0].shape[i] if n == 0 else n for i, n in enumerate(shape)]
    return x[0].reshape(shape)  # type: ignore[no-any-return]


def _flatten(x: Inputs, a: Attributes) -> Tensor:
    axis = a.get("axis", 1)
    axis = axis + x[0].ndim if axis < 0 else axis
    rows = 1
    for size in x[0].shape[:axis]:
        rows *= size
    return x[0].reshape(rows, -1)  # type: ignore[no-any-return]


def _transpose(x: Inputs, a: Attributes) -> Tensor:
    return x[0].permute(a.get("perm") or list(range(x[0].ndim))[::-1])  # type: ignore[no-any-return]


def _squeeze(x: Inputs, _: Attributes) -> Tensor:
    axes = integers(x, 1)
    return x[0].squeeze() if axes is None else x[0].squeeze(tuple(axes))  # type: ignore[no-any-return]


def _unsqueeze(x: Inputs, _: Attributes) -> Tensor:
    axes = integers(x, 1) or []
    rank, result = x[0].ndim + len(axes), x[0]
    for axis in sorted(axis % rank for axis in axes):
        result = result.unsqueeze(axis)
    return result  # type: ignore[no-any-return]


def _split(x: Inputs, a: Attributes) -> tuple[Tensor, ...]:
    axis, sizes = a.get("axis", 0), integers(x, 1)
    if sizes is None:
        size = -(-x[0].shape[axis] // a["num_outputs"])
        return tuple(x[0].split(size, axis))
    return tuple(x[0].split(sizes, axis))


def _slice(x: Inputs, _: Attributes) -> Tensor:
    starts, ends, result = integers(x, 1) or [], integers(x, 2) or [], x[0]
    axes = integers(x, 3) or list(range(len(starts)))
    steps = integers(x, 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = result.shape[axis]
        first, last = start, end
        if step > 0:
            first, last, _step = slice(start, end, step).indices(size)
            places = torch.arange(first, max(first, last), step)
        else:  # slice.indices reads an end below -size as "not before the first"
            first = min(start if start >= 0 else start + size, size - 1)
            last = end if end >= 0 else max(end + size, -1)
            places = torch.arange(first, min(first, last), step)
        result = result.index_select(axis, places)
    return result  # type: ignore[no-any-return]


def _places(indices: Tensor, size: int) -> Tensor:
    """Convert an ONNX operator's indices into an axis of `size` positions, where negative ones
    count from the end, to 0..size."""
    return torch.where(indices < 0, indices + size, indices).long()


def _gather(x: Inputs, a: Attributes) -> Tensor:
    axis = a.get("axis", 0) % x[0].ndim
    places = _places(x[1], x[0].shape[axis])
    rows = x[0].index_select(axis, places.reshape(-1))
    shape = (*x[0].shape[:axis], *places.shape, *x[0].shape[axis + 1 :])
    return rows.reshape(shape)  # type: ignore[no-any-return]


def _gather_elements(x: Inputs, a: Attributes) -> Tensor:
    axis = a.get("axis", 0)
    return x[0].gather(axis, _places(x[1], x[0].shape[axis]))  # type: ignore[no-any-return]


def _gather_nd(x: Inputs, a: Attributes) -> Tensor:
    if a.get("batch_dims"):
        raise NotImplementedError
    return x[0][tuple(x[1].long().unbind(-1))]  # type: ignore[no-any-return]


def _scatter_nd(x: Inputs, a: Attributes) -> Tensor:
    if a.get("reduction", "none") != "none":
        raise NotImplementedError
    result = x[0].clone()
    result[tuple(x[1].long().unbind(-1))] = x[2]
    return result  # type: ignore[no-any-return]


def _scatter_elements(x: Inputs, a: Attributes) -> Tensor:
    if a.get("reduction", "none") != "none":
        raise NotImplementedError
    axis = a.get("axis", 0)
    return x[0].scatter(axis, _places(x[1], x[0].shape[axis]), x[2])  # type: ignore[no-any-return]


def _expand(x: Inputs, _: Attributes) -> Tensor:
    shape = torch.broadcast_shapes(x[0].shape, tuple(integers(x, 1) or ()))
    return x[0].expand(shape)  # type: ignore[no-any-return]


def _pad(x: Inputs, a: Attributes) -> Tensor:
    rank, sizes = x[0].ndim, integers(x, 1) or []
    axes = integers(x, 3) or list(range(rank))
    half = len(sizes) // 2
    sides = dict.fromkeys(range(rank), (0, 0))
    for axis, before, after in zip(axes, sizes[:half], sizes[half:], strict=True):
        sides[axis % rank] = before, after
    mode, fill = a.get("mode", "constant"), value(x, 2)
    flat = [n for axis in reversed(range(rank)) for n in sides[axis]]
    if mode == "constant":
        number = 0 if fill is None else fill.item()
        return functional.pad(x[0], flat, value=number)
    while len(flat) > 2 and flat[-2:] == [0, 0]:  # torch reflects the last axes only
        flat = flat[:-2]
    if mode not in ("reflect", "edge") or len(flat) // 2 > rank - 2:
        raise NotImplementedError
    return functional.pad(x[0], flat, mode="reflect" if mode == "reflect" else "replicate")


def _constant_of_shape(x: Inputs, a: Attributes) -> Tensor:
    fill: Tensor = a.get("value", torch.zeros(1))
    return torch.full(integers(x, 0) or [], fill.item(), dtype=fill.dtype)


def _shape(x: Inputs, a: Attributes) -> Tensor:
    return torch.tensor(list(x[0].shape)[a.get("start", 0) : a.get("end")], dtype=torch.int64)


def _depth_to_space(x: Inputs, a: Attributes) -> Tensor:
    n, c, h, w = x[0].shape
    b = a["blocksize"]
    if a.get("mode", "DCR") == "DCR":
        parts = x[0].reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x[0].reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // b**2, h * b, w * b)  # type: ignore[no-any-return]


def _space_to_depth(x: Inputs, a: Attributes) -> Tensor:
    n, c, h, w = x[0].shape
    b = a["blocksize"]
    parts = x[0].reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * b**2, h // b, w // b)  # type: ignore[no-any-return]


def _triangle(x: Inputs, a: Attributes) -> Tensor:
    k = 0 if value(x, 1) is None else int(x[1])
    result: Tensor = x[0].triu(k) if a.get("upper", 1) else x[0].tril(k)
    return result


def _range(x: Inputs, _: Attributes) -> Tensor:
    start, limit, step = (n.item() for n in x)
    return torch.arange(start, limit, step, dtype=x[0].dtype)


LAYOUT: Mapping[str, Callable[[Inputs, Attributes], Any]] = {
    "Identity": lambda x, _: x[0],
    "Dropout": lambda x, _: x[0],
    "Cast": lambda x, a: x[0].to(DTYPES[a["to"]]),
    "CastLike": lambda x, _: x[0].to(x[1].dtype),
    "Shape": _shape,
    "Size": lambda x, _: torch.tensor(x[0].numel(), dtype=torch.int64),
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": lambda x, a: torch.cat(list(x), a["axis"]),
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "Expand": _expand,
    "Tile": lambda x, _: x[0].repeat(integers(x, 1)),
    "Pad": _pad,
    "ConstantOfShape": _constant_of_shape,
    "DepthToSpace": _depth_to_space,
    "SpaceToDepth": _space_to_depth,
    "Trilu": _triangle,
    "Range": _range,
}
