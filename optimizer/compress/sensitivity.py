"""What rounding a weight is predicted to cost the model, in nats per token.

To second order in a change D (out, in) of one weight, with its block of the Fisher information
factored (after K-FAC; Martens and Grosse 2015, arXiv 1503.05671),

    KL(float || changed) = 1/2 tr(G D A D^T)     G = diag E[g^2]     A = E[|g|^2 x x^T] / E[|g|^2]

x is the module's input at a token and g the gradient, at its output there, of the log-probability
of a whole text drawn from the model's own distribution. Of G only the diagonal is kept: errors of
two outputs are hardly related. A counts each token by its gradient, unlike K-FAC's: the inputs of
a few modules are enormous at tokens whose output is of no consequence (measured: without it
down_proj of SmolLM2's layer 11 seems ten times as costly as it is).

To nearest, D is the error of rounding. GPTQ moves each error on to inputs that come later: with
H = E[x x^T] = L P L^T in its order, L of unit diagonal, what it leaves is D = e L^-1, e being the
errors of the single roundings, and those are made with scales searched by P. As good as
independent, they cost

    1/2 sum_oj G_o e_oj^2 (L^-1 A L^-T)_jj

"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimizer.compress.hessian import damped
from optimizer.compress.rtn import rtn, searched
from optimizer.qtensor import Scheme

Batch = Mapping[str, Tensor]
SLICE = 512  # tokens whose logits exist at a time


@dataclass(frozen=True)
class Slopes:
    """Of one module: outputs (out,), the diagonal of G; tokens, |g|^2 of each real token in the
    order of the batches, one tensor per batch."""

    outputs: Tensor
    tokens: list[Tensor]


def output_slopes(
    features: Callable[[Batch], Tensor],
    head: Tensor,
    linears: Mapping[str, nn.Linear],
    batches: Iterable[Batch],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Slopes]:
    """By module.

    features(batch): what the head reads for its input_ids and attention_mask, (batch, sequence,
    features), computed with `linears`; head (vocabulary, features): logits are features @ head.T.
    dtype: that of the products. Raises ValueError naming a module that had no part in the answer,
    or whose gradient is not finite.
    """
    sums: dict[str, Tensor] = {}
    energy: dict[str, list[Tensor]] = {name: [] for name in linears}
    generator = torch.Generator().manual_seed(seed)
    head = head.detach().to(dtype)
    handles = [m.register_forward_hook(_watch(n, sums, energy[n])) for n, m in linears.items()]
    reals = []
    try:
        for batch in batches:
            reals.append(batch["attention_mask"].bool())
            with (
                torch.enable_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
            ):
                rows = features(batch)[reals[-1]]
            slope = torch.cat([_drawn(r, head, generator) for r in rows.detach().split(SLICE)])
            torch.autograd.backward([rows], [slope.to(rows.dtype)])
    finally:
        for handle in handles:
            handle.remove()
    tokens = sum(int(real.sum()) for real in reals)
    for name in linears:
        if name not in sums:
            raise ValueError(f"{name}: its output has no part in the answer")
        if not bool(torch.isfinite(sums[name]).all()):
            raise ValueError(f"{name}: its gradient holds NaN or infinity")
    return {
        name: Slopes(
            sums[name] / tokens,
            [e[real.reshape(-1)] for e, real in zip(energy[name], reals, strict=True)],
        )
        for name in linears
    }


def _watch(name: str, sums: dict[str, Tensor], energy: list[Tensor]) -> Callable[..., None]:
    """A forward hook that adds up the squared gradients at the module's output."""

    def add(slope: Tensor) -> None:
        squares = slope.float().square().flatten(0, -2)
        energy.append(squares.sum(1))
        sums[name] = sums[name] + squares.sum(0) if name in sums else squares.sum(0)

    def hook(_module: nn.Module, _args: object, out: Tensor) -> None:
        if not out.requires_grad:  # nothing before it takes a gradient: it starts here
            out.requires_grad_(True)
        out.register_hook(add)

    return hook


def _drawn(rows: Tensor, head: Tensor, generator: torch.Generator) -> Tensor:
    """d(-log p(y)) / d row of (tokens, features) for next tokens y drawn from p."""
    chances = (rows.to(head.dtype) @ head.T).float().softmax(-1)
    drawn = torch.multinomial(chances, 1, generator=generator)
    chances.scatter_add_(1, drawn, -torch.ones_like(drawn, dtype=torch.float32))
    return (chances.to(head.dtype) @ head).float()


@dataclass(frozen=True)
class Metric:
    """What errors cost at the inputs of one module. full (in, in) of a change that stays where it
    is made; or, by input (in,), importance: what gptq searches scales by, and left: what an error
    costs once it has been moved on."""

    full: Tensor | None = None
    importance: Tensor | None = None
    left: Tensor | None = None


def metric(weighted: Tensor, plain: Tensor | None = None) -> Metric:
    """weighted: A; plain: H when gptq rounds, None for round to nearest; both (in, in), means over
    tokens. Raises ValueError as hessian.damped does."""
    if plain is None:
        return Metric(full=weighted)
    quadratic = damped(plain)
    back = quadratic.matrix.diagonal().argsort(stable=True)  # gptq takes the largest first
    lower = torch.linalg.cholesky(quadratic.matrix.double()[back][:, back])
    scale = lower.diagonal()
    half = torch.linalg.solve_triangular(lower, weighted.double()[back][:, back], upper=False)
    whole = torch.linalg.solve_triangular(lower, half.T, upper=False)
    left = whole.diagonal() * scale.square()
    order = back.argsort()
    return Metric(importance=scale.square().float()[order], left=left.float()[order])


def predicted(weight: Tensor, scheme: Scheme, slopes: Tensor, costs: Metric) -> float:
    """Nats per token that coding `weight` (out, in) by `scheme` costs.

    slopes (out,): the diagonal of G. Raises ValueError for NaN or infinity in weight.
    """
    weight = weight.float()
    if costs.importance is None or scheme.bits == 8:
        error = rtn(weight, scheme).dequantize() - weight
    else:
        error = searched(weight, scheme, costs.importance).dequantize() - weight
    if costs.full is not None:
        by_row = ((error @ costs.full) * error).sum(1)
    else:
        assert costs.left is not None
        by_row = error.square() @ costs.left
    return 0.5 * float(slopes.double() @ by_row.double())
