"""What a recipe may ask of a convolution, which is quantized as a matrix (out, inputs of a group
times height times width), by rounding to nearest, which may be learned on, with a static range of
its input."""

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

LARGEST = 2.0**31 - 2.0**8  # of the integers that float32 holds


def check(
    quantize: Quantize,
    sparsity: Sparsity | None,
    modules: Mapping[str, nn.Conv2d],
    schemes: Iterable[Scheme],
) -> None:
    """Raise RecipeError for what a convolution is not quantized with. modules: the convolutions
    that `schemes` are for; without any, nothing is checked."""
    if not modules:
        return
    for name, module in modules.items():
        _check_padding(name, module)
    for method in (*quantize.chosen, quantize.block_rounding):
        if not method.convolutions:
            why = f"{method.name} is for linear layers"
            known = " or ".join(m.name for m in METHODS.values() if m.convolutions)
            raise _refused("quantize.method", why, known)
    static = quantize.activations is not None and quantize.static_activations
    if not static or (quantize.activations and quantize.activations.symmetric):
        raise _refused(
            "quantize.activations",
            "integers are convolved with integers, padded with that of 0",
            "{granularity: tensor}, not symmetric",
        )
    if sparsity is not None:
        raise _refused("sparsity", "weights of convolutions are not pruned", "no sparsity")
    if any(s != Scheme(8) for s in schemes) or quantize.allocate is not None:
        raise _refused(
            "quantize.weights",
            "runtimes convolve int8 with a scale per output channel",
            "{bits: 8, granularity: channel}",
        )


def _check_padding(name: str, module: nn.Conv2d) -> None:
    try:
        ConvGeometry.of(module)
    except ValueError as e:
        raise RecipeError(
            f"{name} cannot be quantized: {e}",
            where="quantize",
            accepted="padding of zeros, as many on both sides",
            fix="Add it to quantize.keep_float.",
        ) from None


def _refused(where: str, why: str, accepted: str) -> RecipeError:
    return RecipeError(
        f"the model has convolutions: {why}",
        where=where,
        accepted=accepted,
        fix="Change it, or add the convolutions to quantize.keep_float.",
    )


def bias_step(covered: Range, scale: Tensor) -> Tensor:
    """(out,) float64, exact: what one integer of a sum is worth. scale (out, 1): of the weight."""
    return scale[:, 0].double() * covered.scale


def integer_bias(bias: Tensor, step: Tensor) -> Tensor:
    """The int32 (out,) that a runtime adds to its integer sums; each is a float32 value, so that
    the integer times its step is one float32 in every runtime."""
    nearest = (bias.double() / step).round().clamp(-LARGEST, LARGEST).float()
    return nearest.to(torch.int32)


def rounded_bias(bias: Tensor, covered: Range, scale: Tensor) -> Tensor:
    """The nearest bias that a sum of integers can start from: within half a step of its own.

    Idempotent. bias (out,) float32.
    """
    step = bias_step(covered, scale)
    return (integer_bias(bias, step).double() * step).float()
