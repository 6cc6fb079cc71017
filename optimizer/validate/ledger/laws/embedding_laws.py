"""Compute the vectors of a sentence embedding in torch and float64, with the bound of each number's
float32 arithmetic: the reference of contract_laws.py, law 2.

Sums and products: Higham & Mary 2019 (roundoff.bound_deviations). An activation moves the error of
its argument by its largest slope and rounds once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.harness.contract import Contract
from optimizer.harness.embedding_settings import LayerAfterPooling
from optimizer.validate.ledger.pieces.roundoff import UNIT, bound_deviations

U = UNIT["fp32"]
LOGARITHM = 4  # roundoffs of a float32 log1p: numpy's is within 2 units in the last place
Bounded = tuple[Tensor, Tensor]
"""(values, bound of each), both (texts, numbers) in float64."""
ACTIVATIONS: Mapping[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "identity": (lambda x: x, 1.0),
    "tanh": (torch.tanh, 1.0),
    "relu": (torch.relu, 1.0),
    "gelu": (functional.gelu, 1.13),
    "sigmoid": (torch.sigmoid, 0.25),
    "silu": (functional.silu, 1.1),
    "leaky_relu": (functional.leaky_relu, 1.0),
    "elu": (functional.elu, 1.0),
}
"""{activation: (its function, its largest slope)}."""


def compute_vectors(source: Contract, hidden: Tensor, mask: Tensor) -> Bounded:
    """Compute the expected embeddings of texts in float64: (values, bounds), both (texts, numbers).

    hidden: hidden states (texts, sequence, width)
    mask: (texts, sequence), 1 for tokens that are pooled, else 0
    """
    parts = [_pool(name, hidden, mask) for name in source.poolings]
    value, bound = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    settings = source.vectors
    for layer, arrays in settings.parameters(source.layer_weights) if settings.layers else ():
        tensors = [torch.from_numpy(a).double() for a in arrays]
        value, bound = LAYERS[layer.kind](layer, value, bound, tensors)
    if source.normalize:
        value, bound = _normalize(LayerAfterPooling("normalize"), value, bound, [])
    return value[:, : settings.dimensions], bound[:, : settings.dimensions]


def compute_weights(source: Contract, logits: Tensor, mask: Tensor) -> Bounded:
    """Compute the expected sparse embeddings of texts in float64: (values, bounds), both (texts,
    vocabulary).

    logits: (texts, sequence, vocabulary)
    mask: (texts, sequence), 1 for tokens, else 0

    The slope of log(1 + x) is at most 1, so the logarithm does not enlarge the error of x.
    """
    settings = source.splade
    each = torch.log1p((logits * mask[..., None]).relu())
    rounded = LOGARITHM * U * each
    if settings.activation == "log1p_relu":
        each = torch.log1p(each)
        rounded = rounded + LOGARITHM * U * each
    if settings.pooling == "max":
        value, at = each.max(1)
        return value, rounded.gather(1, at[:, None])[:, 0]
    wide = bound_deviations(each[:, 0].numel(), each.shape[1]) * each.shape[1] ** 0.5
    return each.sum(1), rounded.sum(1) + wide * U * each.sum(1)


def _pool(name: str, hidden: Tensor, mask: Tensor) -> Bounded:
    """Pool hidden states (texts, sequence, width), as the law's reference, to (values, bounds),
    both (texts, width).

    name: name of the pooling
    """
    exact = torch.zeros(len(hidden), hidden.shape[-1], dtype=torch.float64)
    rows, places = torch.arange(len(hidden)), torch.arange(hidden.shape[1])
    if name == "cls":
        return hidden[rows, mask.argmax(1)], exact
    if name == "lasttoken":
        return hidden[rows, (mask * (places + 1)).argmax(1)], exact
    if name == "max":
        return hidden.masked_fill(mask[..., None] == 0, -math.inf).amax(1), exact
    weights = mask * (places + 1) if name == "weightedmean" else mask
    total = weights.sum(1, keepdim=True).clamp_min(1)
    divisor = total.sqrt() if name == "mean_sqrt_len_tokens" else total
    value = torch.einsum("bsd,bs->bd", hidden, weights) / divisor
    size = torch.einsum("bsd,bs->bd", hidden.abs(), weights) / divisor
    others = {"weightedmean": 2, "mean_sqrt_len_tokens": 2}.get(name, 1)  # roundings besides sums
    wide = bound_deviations(exact.numel(), hidden.shape[1]) * hidden.shape[1] ** 0.5 + others
    return value, wide * U * size


def _product(value: Tensor, bound: Tensor, weight: Tensor) -> Bounded:
    wide = bound_deviations(len(value) * len(weight), weight.shape[1]) * weight.shape[1] ** 0.5
    size = value.abs() @ weight.abs().T
    return value @ weight.T, bound @ weight.abs().T + wide * U * size


def _dense(
    layer: LayerAfterPooling, value: Tensor, bound: Tensor, tensors: list[Tensor]
) -> Bounded:
    out, error = _product(value, bound, tensors[0])
    if layer.bias:
        out = out + tensors[1]
        error = error + U * out.abs()
    activation, slope = ACTIVATIONS[layer.activation]
    out = activation(out)
    error = slope * error + U * out.abs()
    if layer.residual:
        projected = layer.inputs != layer.outputs
        more = _product(value, bound, tensors[-1]) if projected else (value, bound)
        out = out + more[0]
        error = error + more[1] + U * out.abs()
    return out, error * (1 + 8 * U)  # roundings of values that already have an error


def _layer_norm(
    layer: LayerAfterPooling, value: Tensor, bound: Tensor, tensors: list[Tensor]
) -> Bounded:
    weight, bias = tensors
    out = functional.layer_norm(value, (layer.inputs,), weight, bias)
    scaled = functional.layer_norm(value, (layer.inputs,))
    deviation = (value.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    moved = bound + bound.mean(1, keepdim=True)
    moved = moved + scaled.abs() * bound.norm(dim=1, keepdim=True) / layer.inputs**0.5
    return out, weight.abs() * moved / deviation * (1 + 1e-3) + U * out.abs()


def _normalize(
    _: LayerAfterPooling, value: Tensor, bound: Tensor, _tensors: list[Tensor]
) -> Bounded:
    norm = value.norm(dim=1, keepdim=True)
    # the norm has its terms' errors and a sum of squares' own; division rounds once more
    terms = bound_deviations(len(value), value.shape[-1]) * value.shape[-1] ** 0.5 + 3
    relative = bound.norm(dim=1, keepdim=True) / norm + terms * U
    value = value / norm
    return value, bound / norm + value.abs() * relative


LAYERS: Mapping[str, Callable[[LayerAfterPooling, Tensor, Tensor, list[Tensor]], Bounded]] = {
    "dense": _dense,
    "layer_norm": _layer_norm,
    "normalize": _normalize,
}
