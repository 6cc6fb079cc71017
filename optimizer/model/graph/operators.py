"""ONNX operators (opset 21) as torch functions: (inputs, attributes) -> tensor or tuple of tensors.

An operator that is not in OPERATORS, or raises NotImplementedError for its attributes, is run by
ONNX Runtime as a model of one node (module.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.model.graph import windows
from optimizer.model.graph.layout import LAYOUT, Attributes, Inputs, integers, value

Operator = Callable[[Inputs, Attributes], Any]


def _of_one(function: Callable[[Tensor], Tensor]) -> Operator:
    return lambda x, _: function(x[0])


def _of_two(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return lambda x, _: function(x[0], x[1])


def _of_many(function: Callable[[Tensor, Tensor], Tensor]) -> Operator:
    return lambda x, _: reduce(function, x)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _mod(x: Inputs, a: Attributes) -> Tensor:
    return torch.fmod(x[0], x[1]) if a.get("fmod") else torch.remainder(x[0], x[1])


def _clip(x: Inputs, _: Attributes) -> Tensor:
    low, high = value(x, 1), value(x, 2)
    result: Tensor = x[0] if low is None else torch.maximum(x[0], low)
    return result if high is None else torch.minimum(result, high)


def _prelu(x: Inputs, _: Attributes) -> Tensor:
    return torch.where(x[0] < 0, x[0] * x[1], x[0])


def _hard_sigmoid(x: Inputs, a: Attributes) -> Tensor:
    scaled: Tensor = a.get("alpha", 0.2) * x[0] + a.get("beta", 0.5)
    return scaled.clamp(0, 1)


def _reduce(function: Callable[..., Tensor]) -> Operator:
    def run(x: Inputs, a: Attributes) -> Tensor:
        axes = integers(x, 1) if len(x) > 1 else a.get("axes")
        if not axes and a.get("noop_with_empty_axes"):
            return x[0]  # type: ignore[no-any-return]
        chosen = list(axes) if axes else list(range(x[0].ndim))
        return function(x[0], chosen, bool(a.get("keepdims", 1)))

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keepdim=keep),
    "ReduceProd": _product,
}


def _arg(function: Callable[..., Tensor]) -> Operator:
    def run(x: Inputs, a: Attributes) -> Tensor:
        if a.get("select_last_index"):
            raise NotImplementedError
        return function(x[0], dim=a.get("axis", 0), keepdim=bool(a.get("keepdims", 1)))

    return run


def _top(x: Inputs, a: Attributes) -> tuple[Tensor, ...]:
    best = torch.topk(
        x[0], int(x[1]), a.get("axis", -1), bool(a.get("largest", 1)), bool(a.get("sorted", 1))
    )
    return best.values, best.indices


def _cumulative(x: Inputs, a: Attributes) -> Tensor:
    axis = int(x[1])
    data: Tensor = x[0]
    data = data.flip(axis) if a.get("reverse") else data
    sums = data.cumsum(axis) - data if a.get("exclusive") else data.cumsum(axis)
    return sums.flip(axis) if a.get("reverse") else sums


def _gemm(x: Inputs, a: Attributes) -> Tensor:
    left = x[0].t() if a.get("transA") else x[0]
    right = x[1].t() if a.get("transB") else x[1]
    result = left @ right
    result = result if a.get("alpha", 1.0) == 1 else result * a["alpha"]
    added = value(x, 2)
    if added is None:
        return result  # type: ignore[no-any-return]
    return result + (added if a.get("beta", 1.0) == 1 else added * a["beta"])  # type: ignore[no-any-return]


def _layer_norm(x: Inputs, a: Attributes) -> Tensor:
    shape = x[0].shape[a.get("axis", -1) % x[0].ndim :]
    bias = value(x, 2)
    return functional.layer_norm(
        x[0],
        shape,
        x[1].expand(shape),
        None if bias is None else bias.expand(shape),
        a.get("epsilon", 1e-5),
    )


def _rms_norm(x: Inputs, a: Attributes) -> Tensor:
    axes = list(range(a.get("axis", -1) % x[0].ndim, x[0].ndim))
    mean = x[0].square().mean(axes, keepdim=True)
    return x[0] / (mean + a.get("epsilon", 1e-5)).sqrt() * x[1]  # type: ignore[no-any-return]


def _batch_norm(x: Inputs, a: Attributes) -> Tensor:
    if a.get("training_mode"):
        raise NotImplementedError
    return functional.batch_norm(x[0], x[3], x[4], x[1], x[2], False, 0.0, a.get("epsilon", 1e-5))


def _group_norm(x: Inputs, a: Attributes) -> Tensor:
    return functional.group_norm(x[0], a["num_groups"], x[1], x[2], a.get("epsilon", 1e-5))


def _instance_norm(x: Inputs, a: Attributes) -> Tensor:
    return functional.instance_norm(x[0], weight=x[1], bias=x[2], eps=a.get("epsilon", 1e-5))


def _lp_normalize(x: Inputs, a: Attributes) -> Tensor:
    norm = x[0].norm(a.get("p", 2), a.get("axis", -1), keepdim=True)
    return torch.where(norm == 0, 0.0, x[0] / norm)  # as ONNX Runtime


OPERATORS: Mapping[str, Operator] = {
    "Add": _of_two(torch.add),
    "Sub": _of_two(torch.sub),
    "Mul": _of_two(torch.mul),
    "Div": _of_two(_divide),
    "Pow": lambda x, _: torch.pow(x[0], x[1]).to(x[0].dtype),
    "Mod": _mod,
    "Neg": _of_one(torch.neg),
    "Abs": _of_one(torch.abs),
    "Exp": _of_one(torch.exp),
    "Log": _of_one(torch.log),
    "Sqrt": _of_one(torch.sqrt),
    "Reciprocal": _of_one(torch.reciprocal),
    "Floor": _of_one(torch.floor),
    "Ceil": _of_one(torch.ceil),
    "Round": _of_one(torch.round),
    "Sign": _of_one(torch.sign),
    "Erf": _of_one(torch.erf),
    "Sin": _of_one(torch.sin),
    "Cos": _of_one(torch.cos),
    "Tan": _of_one(torch.tan),
    "Atan": _of_one(torch.atan),
    "Tanh": _of_one(torch.tanh),
    "Sigmoid": _of_one(torch.sigmoid),
    "Relu": _of_one(torch.relu),
    "Softplus": _of_one(functional.softplus),
    "Softsign": _of_one(functional.softsign),
    "Mish": _of_one(functional.mish),
    "HardSwish": _of_one(functional.hardswish),
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda x, a: functional.leaky_relu(x[0], a.get("alpha", 0.01)),
    "Elu": lambda x, a: functional.elu(x[0], a.get("alpha", 1.0)),
    "Celu": lambda x, a: functional.celu(x[0], a.get("alpha", 1.0)),
    "Selu": _of_one(functional.selu),
    "Gelu": lambda x, a: functional.gelu(x[0], approximate=a.get("approximate", "none")),
    "PRelu": _prelu,
    "Clip": _clip,
    "Min": _of_many(torch.minimum),
    "Max": _of_many(torch.maximum),
    "Sum": _of_many(torch.add),
    "Mean": lambda x, _: reduce(torch.add, x) / len(x),
    "Equal": _of_two(torch.eq),
    "Greater": _of_two(torch.gt),
    "GreaterOrEqual": _of_two(torch.ge),
    "Less": _of_two(torch.lt),
    "LessOrEqual": _of_two(torch.le),
    "Not": _of_one(torch.logical_not),
    "And": _of_two(torch.logical_and),
    "Or": _of_two(torch.logical_or),
    "Xor": _of_two(torch.logical_xor),
    "IsNaN": _of_one(torch.isnan),
    "Where": lambda x, _: torch.where(x[0], x[1], x[2]),
    "MatMul": _of_two(torch.matmul),
    "Gemm": _gemm,
    "Einsum": lambda x, a: torch.einsum(a["equation"], *x),
    "Softmax": lambda x, a: x[0].softmax(a.get("axis", -1)),
    "LogSoftmax": lambda x, a: x[0].log_softmax(a.get("axis", -1)),
    "LayerNormalization": _layer_norm,
    "RMSNormalization": _rms_norm,
    "BatchNormalization": _batch_norm,
    "GroupNormalization": _group_norm,
    "InstanceNormalization": _instance_norm,
    "LpNormalization": _lp_normalize,
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "TopK": _top,
    "CumSum": _cumulative,
    **{name: _reduce(function) for name, function in REDUCTIONS.items()},
    **LAYOUT,
    **windows.WINDOWS,
}
"""{operator of the default domain: function}."""
