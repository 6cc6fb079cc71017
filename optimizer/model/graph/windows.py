"""Torch functions for the ONNX operators on windows of positions: convolution, pooling,
resizing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.model.graph.layout import Attributes, Inputs, value


def sides(a: Attributes, axes: int) -> tuple[list[int], list[int]]:
    """Return the padding of `axes` axes by an ONNX operator's attributes: (numbers before each
    axis, numbers after). Raises NotImplementedError for padding given as a word (auto_pad)."""
    if a.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise NotImplementedError
    pads = list(a.get("pads") or [0] * (2 * axes))
    return pads[:axes], pads[axes:]


def _padded(x: Tensor, a: Attributes, axes: int, fill: float) -> tuple[Tensor, list[int]]:
    """Pad x as an ONNX operator does where the two sides of an axis differ; return (padded x,
    padding left to do, equal on both sides of each axis).

    fill: value of the padding
    """
    before, after = sides(a, axes)
    if before == after:
        return x, before
    flat = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
    return functional.pad(x, flat, value=fill), [0] * axes


def _convolve(x: Inputs, a: Attributes) -> Tensor:
    axes = x[1].ndim - 2
    image, padding = _padded(x[0], a, axes, 0.0)
    function: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[axes - 1]
    result: Tensor = function(
        image,
        x[1],
        value(x, 2),
        a.get("strides") or 1,
        padding,
        a.get("dilations") or 1,
        a.get("group", 1),
    )
    return result


def _transposed(x: Inputs, a: Attributes) -> Tensor:
    axes = x[1].ndim - 2
    before, after = sides(a, axes)
    if before != after or a.get("output_shape"):
        raise NotImplementedError
    names = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
    function: Any = getattr(functional, names[axes - 1])
    result: Tensor = function(
        x[0],
        x[1],
        value(x, 2),
        a.get("strides") or 1,
        before,
        a.get("output_padding") or 0,
        a.get("group", 1),
        a.get("dilations") or 1,
    )
    return result


def _max_pool(x: Inputs, a: Attributes) -> Tensor:
    kernel = list(a["kernel_shape"])
    image, padding = _padded(x[0], a, len(kernel), -torch.inf)
    names = ("max_pool1d", "max_pool2d", "max_pool3d")
    function: Any = getattr(functional, names[len(kernel) - 1])
    result: Tensor = function(
        image,
        kernel,
        a.get("strides") or 1,
        padding,
        a.get("dilations") or 1,
        bool(a.get("ceil_mode")),
    )
    return result


def _average_pool(x: Inputs, a: Attributes) -> Tensor:
    kernel, counts = list(a["kernel_shape"]), bool(a.get("count_include_pad"))
    before, after = sides(a, len(kernel))
    if (before != after and not counts) or set(a.get("dilations") or [1]) != {1}:
        raise NotImplementedError
    image, padding = _padded(x[0], a, len(kernel), 0.0)
    names = ("avg_pool1d", "avg_pool2d", "avg_pool3d")
    function: Any = getattr(functional, names[len(kernel) - 1])
    result: Tensor = function(
        image, kernel, a.get("strides") or 1, padding, bool(a.get("ceil_mode")), counts
    )
    return result


WHOLE = 1e-3  # distance of a size from a whole number that is rounding of its scale
COORDINATES = {
    "half_pixel": False,
    "pytorch_half_pixel": False,
    "align_corners": True,
}
"""{coordinate_transformation_mode: torch's align_corners}, of linear and cubic resizing."""


def _resize(x: Inputs, a: Attributes) -> Tensor:
    """Compute ONNX's Resize in torch on images (batch, channels, height, width). Raises
    NotImplementedError for modes in which torch's interpolate gives other values."""
    image, scales, exact_size = x[0], value(x, 2), value(x, 3)
    plain = a.get("keep_aspect_ratio_policy", "stretch") == "stretch" and not a.get("axes")
    if image.ndim != 4 or not plain or a.get("antialias"):
        raise NotImplementedError
    if exact_size is not None and exact_size.numel():
        size = [int(n) for n in exact_size.tolist()]
    else:
        sizes = [n * s for n, s in zip(image.shape, scales.tolist(), strict=True)]
        size = [round(n) for n in sizes]
        if any(abs(n - exact) > WHOLE for n, exact in zip(size, sizes, strict=True)):
            raise NotImplementedError  # coordinates follow the scale, torch's the sizes
    if size[:2] != list(image.shape[:2]):
        raise NotImplementedError
    mode = a.get("mode", "nearest")
    where = a.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        if where != "asymmetric" or a.get("nearest_mode", "round_prefer_floor") != "floor":
            raise NotImplementedError
        return functional.interpolate(image, size=size[2:], mode="nearest")
    if where not in COORDINATES or (mode == "cubic" and a.get("cubic_coeff_a", -0.75) != -0.75):
        raise NotImplementedError
    torch_mode = {"linear": "bilinear", "cubic": "bicubic"}[mode]
    return functional.interpolate(
        image, size=size[2:], mode=torch_mode, align_corners=COORDINATES[where]
    )


def _over_positions(function: Callable[..., Tensor]) -> Callable[[Inputs, Attributes], Tensor]:
    return lambda x, _: function(x[0], list(range(2, x[0].ndim)), keepdim=True)


WINDOWS: Mapping[str, Callable[[Inputs, Attributes], Any]] = {
    "Conv": _convolve,
    "ConvTranspose": _transposed,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "GlobalAveragePool": _over_positions(torch.mean),
    "GlobalMaxPool": _over_positions(torch.amax),
    "Resize": _resize,
}
