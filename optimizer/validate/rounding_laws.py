"""What holds for codes that a method chose by what comes out, so that they are not the nearest.

On held-out inputs, x of the float model and x' of the compressed one, both as they enter a module,
and with W what is asked for and Q the values of the codes,

    aim    |x W^T - x' Q^T|     what the method makes small: earlier errors are made up for
    alone  |x' W^T - x' Q^T|    the module by itself, which pays for that

are at most ROUNDING[method].aim times: `aim`, what W rounded to the nearest code gives, with scales
that just cover it; `alone`, that plus |x W^T - x' W^T|, what there was to make up for. Both hold
(1) of all outputs of a module together, and (2) of every output by itself, where one that plain
rounding happens to hit is held to half the middle one's error. (Making up for it exactly takes
1 in the second law, overshooting by as much again 2.) A method that does not look at the float
model's inputs is held to `aim` with x = x'. Tokens count as they do for gptq (hessian.counted):
the massive activations of a few decide over none of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from optimizer.compress.hessian import counted
from optimizer.compress.simulate import code_per_token, code_static
from optimizer.qtensor import absmax_scale, quantize
from optimizer.state import CompressedState
from optimizer.validate.distance import Array
from optimizer.validate.tolerances import Rounding
from optimizer.validate.trace import Trace


def outputs(
    state: CompressedState,
    wanted: Mapping[str, Tensor],
    rounding: Rounding,
    compressed: Sequence[Trace],
    exact: Sequence[Trace],
    token_limit: float,
    head: str,
) -> list[str]:
    """Both laws, one sentence per module. wanted: the float weights, folded where methods fold;
    compressed and exact: traces of the compressed and of the float (folded) model; the same twice
    for a method that does not compare them. token_limit: gptq's. head: a module that
    makes up for nothing, whoever asks. Weights of no traced module are left to other laws."""
    broken = []
    for name, q in state.weights.items():
        module = name.removesuffix(".weight")
        x = _inputs(compressed, module)
        real = x if module == head else _inputs(exact, module)
        if x is None or real is None:
            continue
        w = wanted[name].float()
        factor = state.factors.get(f"{module}:input")
        if factor is not None:
            w, x, real = w / factor[None], x * factor, real * factor
        coded = _coded(state, module, x)
        share = counted(coded, token_limit)
        coded, x, real = coded * share, x * share, real * share
        plain = quantize(w, *absmax_scale(w, q.scheme), q.scheme).dequantize()
        ours, theirs = coded @ q.dequantize().T, coded @ plain.T
        aim, alone = real @ w.T, x @ w.T
        found = _beyond(aim - ours, [aim - theirs], *rounding.aim)
        found = found or _beyond(alone - ours, [alone - theirs, aim - alone], *rounding.aim)
        if found:
            broken.append(f"{name}: {found}")
    return broken


def _beyond(error: Tensor, allowed: Sequence[Tensor], module: float, row: float) -> str:
    """error and each of allowed, whose sizes add up: (tokens, outputs)."""
    rows, usual = error.norm(dim=0), torch.stack([a.norm(dim=0) for a in allowed]).sum(0)
    whole = float(error.norm()) / max(sum(float(a.norm()) for a in allowed), 1e-30)
    more = " and earlier errors" if len(allowed) > 1 else ""
    if whole > module:
        return (
            f"its outputs are {whole:.2f} times as far off as by plain rounding{more}, {module} is "
            "declared"
        )
    each = rows / usual.clamp(min=float(usual.median()) / 2 + 1e-30)
    if float(each.max()) > row:
        return (
            f"output {int(each.argmax())} is {float(each.max()):.2f} times as far off as by plain "
            f"rounding{more}, {row} is declared"
        )
    return ""


def _coded(state: CompressedState, module: str, x: Tensor) -> Tensor:
    """x, already multiplied by the site's factor, as its codes say it is."""
    mode = state.activations_of(module)
    if mode == "token":
        return code_per_token(x)
    return x if mode is None else code_static(x, state.ranges[f"{module}:input"])


def _inputs(traces: Iterable[Trace], module: str) -> Tensor | None:
    """(tokens, in) of the real tokens that entered `module`."""
    rows: list[Array] = [
        array[trace.mask.astype(bool)]
        for trace in traces
        for (name, _), array in trace.inputs.items()
        if name == module
    ]
    return torch.cat([torch.from_numpy(a) for a in rows]) if rows else None
