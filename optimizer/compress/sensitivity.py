"""What rounding a weight is predicted to cost the model, in nats per token.

To second order in a change D (out, in) of one weight, with its blocks of the Fisher information
factored (K-FAC; Martens and Grosse 2015, arXiv 1503.05671),

    KL(float || changed) = 1/2 tr(G D A D^T)        A = E[x x^T]   G = E[g g^T]

x is the module's input at a token and g the gradient, at its output there, of the log-probability
of a whole text drawn from the model's own distribution. Of G the diagonal is kept: the errors of
two outputs are hardly related.

D is the error of rounding to nearest. GPTQ moves most of an input's error onto inputs that come
later, and what remains of e_j is its part that these cannot answer for: with A = L P L^T in its
order, P diagonal, that is P_j e_j^2 (P_j <= A_jj; the cost GPTQ itself counts in, gptq.py). So
A is replaced by P, and D by the rounding that least of e P e^T asks for.

(Measured on SmolLM2, 8 windows, symmetric 4 bits in groups of 64: the sum over all modules
predicts 0.498 for rtn and 0.081 for gptq.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from optimizer.compress.hessian import damped
from optimizer.compress.rtn import rtn, searched
from optimizer.qtensor import Scheme

Batch = Mapping[str, Tensor]
SLICE = 512  # tokens whose logits exist at a time


def output_slopes(
    features: Callable[[Batch], Tensor],
    head: Tensor,
    linears: Mapping[str, nn.Linear],
    batches: Iterable[Batch],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """{module: the diagonal of G (out,)}, mean over real tokens.

    features(batch): what the head reads for its input_ids and attention_mask, (batch, sequence,
    features), computed with `linears`; head (vocabulary, features): logits are features @ head.T.
    dtype: that of the products. Raises ValueError naming a module that had no part in the answer,
    or whose gradient is not finite.
    """
    sums: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    head = head.detach().to(dtype)
    handles = [m.register_forward_hook(_watch(n, sums)) for n, m in linears.items()]
    tokens = 0
    try:
        for batch in batches:
            real = batch["attention_mask"].bool()
            with (
                torch.enable_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
            ):
                rows = features(batch)[real]
            slope = torch.cat([_drawn(r, head, generator) for r in rows.detach().split(SLICE)])
            torch.autograd.backward([rows], [slope.to(rows.dtype)])
            tokens += len(rows)
    finally:
        for handle in handles:
            handle.remove()
    for name in linears:
        if name not in sums:
            raise ValueError(f"{name}: its output has no part in the answer")
        if not bool(torch.isfinite(sums[name]).all()):
            raise ValueError(f"{name}: its gradient holds NaN or infinity")
    return {name: sums[name] / tokens for name in linears}


def _watch(name: str, sums: dict[str, Tensor]) -> Callable[..., None]:
    """A forward hook that adds up the squared gradients at the module's output."""

    def add(slope: Tensor) -> None:
        squares = slope.float().square().flatten(0, -2).sum(0)
        sums[name] = sums[name] + squares if name in sums else squares

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


def unanswered(moment: Tensor) -> Tensor:
    """P (in,) of A = moment (in, in): of each input what those after it, by size, do not tell.

    Raises ValueError as hessian.damped does.
    """
    quadratic = damped(moment)
    back = quadratic.matrix.diagonal().argsort(stable=True)  # gptq takes the largest first
    lower = torch.linalg.cholesky(quadratic.matrix.double()[back][:, back])
    pivots = torch.empty(len(back))
    pivots[back] = lower.diagonal().square().float()
    return pivots


def predicted(
    weight: Tensor, scheme: Scheme, slopes: Tensor, moment: Tensor, pivots: Tensor | None
) -> float:
    """Nats per token that coding `weight` (out, in) by `scheme` costs.

    slopes (out,): of output_slopes; moment (in, in): A; pivots (in,): `unanswered` of it when
    gptq rounds, None for round to nearest. Raises ValueError for NaN or infinity in weight.
    """
    weight = weight.float()
    if pivots is None or scheme.bits == 8:
        error = rtn(weight, scheme).dequantize() - weight
    else:
        error = searched(weight, scheme, pivots).dequantize() - weight
    by_row = ((error @ moment) * error).sum(1) if pivots is None else error.square() @ pivots
    return 0.5 * float(slopes.double() @ by_row.double())
