"""Check the recipe for convolutions, and compute their integer biases.

A convolution is quantized as a matrix (out, in of a group * height * width), by rounding to
nearest, which AutoRound may improve, with a static range of its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import Range
from optimizer.recipe.compression.methods import METHODS
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity

LARGEST = 2.0**31 - 2.0**8  # largest int32 that float32 holds


def check(
    quantize: Quantize,
    sparsity: Sparsity | None,
    modules: Mapping[str, nn.Conv2d],
    schemes: Iterable[Scheme],
) -> None:
    """Raise RecipeError before compress starts for options that convolutions do not support.

    modules, schemes: {name: convolution to quantize}, and their schemes; no modules: no check
    """
    if not modules:
        return
    for name, module in modules.items():
        _check_padding(name, module)
    for method in (*quantize.chosen, quantize.block_rounding):
        if not method.convolutions:
            why = f"{method.name} is for linear layers"
            others = " or ".join(m.name for m in METHODS.values() if m.convolutions)
            raise _convolution_error("quantize.method", why, others)
    static = quantize.activations is not None and quantize.static_activations
    if not static or (quantize.activations and quantize.activations.symmetric):
        raise _convolution_error(
            "quantize.activations",
            "runtimes convolve integers with integers",
            "{granularity: tensor}, not symmetric",
        )
    if sparsity is not None:
        raise _convolution_error(
            "sparsity", "weights of convolutions are not pruned", "no sparsity"
        )
    if any(s != Scheme(8) for s in schemes) or quantize.allocate is not None:
        raise _convolution_error(
            "quantize.weights",
            "runtimes convolve int8 with a scale per output channel",
            "{bits: 8, granularity: channel}",
        )


def _check_padding(name: str, module: nn.Conv2d) -> None:
    try:
        ConvGeometry.read(module)
    except ValueError as e:
        raise RecipeError(
            f"{name} cannot be quantized: {e}",
            where="quantize",
            accepted="padding with zeros, equal on both sides",
            fix="Add it to quantize.keep_float.",
        ) from None


def _convolution_error(where: str, why: str, accepted: str) -> RecipeError:
    return RecipeError(
        f"the model has convolutions: {why}",
        where=where,
        accepted=accepted,
        fix="Change it, or add the convolutions to quantize.keep_float.",
    )


def compute_bias_step(covered: Range, scale: Tensor) -> Tensor:
    """Compute the step of a convolution's integer bias, exact float64 (out,): input scale * weight
    scale, the real value of 1 in the integer sums."""
    return scale[:, 0].double() * covered.scale


def integer_bias(bias: Tensor, step: Tensor) -> Tensor:
    """The int32 bias (out,) of a quantized convolution that a runtime adds to its integer sums;
    each is a float32 value, so that its product with the step is the same float32 in every runtime.
    """
    nearest = (bias.double() / step).round().clamp(-LARGEST, LARGEST).float()
    return nearest.to(torch.int32)


def round_bias(bias: Tensor, covered: Range, scale: Tensor) -> Tensor:
    """Round the bias of a quantized convolution, float32 (out,), to multiples of
    compute_bias_step(covered, scale)."""
    step = compute_bias_step(covered, scale)
    return (integer_bias(bias, step).double() * step).float()
