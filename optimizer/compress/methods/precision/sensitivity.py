"""Predict the cost of rounding a weight, in nats per token.

With N the gradient of the log-probability of a text by one weight (out, in), for texts of T tokens
in total that are sampled from the model, a change D of the weight costs to second order

    KL(float || changed) = 1/(2T) sum <D, N>^2 = 1/2 tr(G D A D^T)
        G = diag(sum N N^T) / T     A = sum N^T N / sum |N|^2

The second form assumes that the entries of D are independent and that N's squares factor into an
output and an input part (as Shampoo, and YAQA, Tseng et al. 2025, arXiv 2505.22988). N is summed
over entire texts (docs/decisions/0024).

D is the error of rounding to nearest, whatever method rounds in the end: GPTQ is taken to reduce it
by the same share everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from optimizer.compress.methods.precision.language_model import Batch, LanguageModel
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import Scheme

SLICE = 512  # tokens whose logits are in memory together


class Curvature:
    """Curvature G and A by which changes of one weight cost nats (see the top of this file), from
    the texts added so far."""

    def __init__(self, out: int, inputs: int, device: torch.device | None = None) -> None:
        self._by_output = torch.zeros(out, device=device)
        self._by_input = torch.zeros(inputs, inputs, device=device)
        self._tokens = 0

    def add(self, gradients: Tensor, rows: Tensor) -> None:
        """Add one text: gradients at its outputs (tokens, out), and its inputs `rows` (tokens,
        in)."""
        gradient = gradients.T @ rows
        self._by_output += gradient.square().sum(1)
        self._by_input.addmm_(gradient.T, gradient)
        self._tokens += len(rows)

    @property
    def outputs(self) -> Tensor:
        """The diagonal of G (out,)."""
        return self._by_output / max(self._tokens, 1)

    @property
    def inputs(self) -> Tensor:
        """A (in, in), of trace 1; all zero where every gradient was zero."""
        return self._by_input / (float(self._by_input.trace()) or 1.0)


def visit_output_gradients(
    model: LanguageModel,
    texts: Iterable[Batch],
    keep: Callable[[str, Tensor], None],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Call keep(module, gradient) for each module and text.

    gradient: (real tokens, out) float32, of minus the text's log-probability at the module's output
    texts: batches of one; the token after each position is sampled anew
    dtype: type of the products

    Raises ValueError naming a module that does not affect the logits, or whose gradient is not
    finite.
    """
    generator = torch.Generator().manual_seed(seed)
    head, linears = model.head.detach().to(dtype), model.linears
    seen: dict[str, Tensor] = {}
    handles = [m.register_forward_hook(_record(n, seen)) for n, m in linears.items()]
    try:
        for text in texts:
            real = text["attention_mask"].bool().to(head.device)
            with (
                torch.enable_grad(),
                torch.autocast(head.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16),
            ):
                rows = model.features(text)[real]
            slope = torch.cat(
                [_sampled_gradient(r, head, generator) for r in rows.detach().split(SLICE)]
            )
            torch.autograd.backward([rows], [slope.to(rows.dtype)])
            for name in linears:
                if name not in seen:
                    raise ValueError(f"{name}: its output does not affect the logits")
                gradient = seen.pop(name).float().flatten(0, -2)[real.reshape(-1)]
                if not bool(torch.isfinite(gradient).all()):
                    raise ValueError(f"{name}: its gradient holds NaN or infinity")
                keep(name, gradient)
    finally:
        for handle in handles:
            handle.remove()


def _record(name: str, seen: dict[str, Tensor]) -> Callable[..., None]:
    """Make a forward hook that stores the gradient at the module's output in `seen` during the
    backward pass, for the cost of rounding it."""

    def put(slope: Tensor) -> None:
        seen[name] = slope.detach()

    def hook(_module: nn.Module, _args: object, out: Tensor) -> None:
        if not out.requires_grad:  # the first module that needs a gradient
            out.requires_grad_(True)
        out.register_hook(put)

    return hook


def _sampled_gradient(rows: Tensor, head: Tensor, generator: torch.Generator) -> Tensor:
    """Compute for the cost of rounding d(-log p(y)) / d row of hidden states (tokens, features),
    for next tokens y that are drawn from the model's own p."""
    chances = (rows.to(head.dtype) @ head.T).float().softmax(-1)
    drawn = torch.multinomial(chances.cpu(), 1, generator=generator).to(chances.device)
    chances.scatter_add_(1, drawn, -torch.ones_like(drawn, dtype=torch.float32))
    return (chances.to(head.dtype) @ head).float()


def predict_cost(weight: Tensor, scheme: Scheme, outputs: Tensor, inputs: Tensor) -> float:
    """Predict the cost of rounding `weight` (out, in) to nearest, in nats per token.

    outputs: (out,), the diagonal of G
    inputs: (in, in), A

    Raises ValueError for NaN or infinity in weight.
    """
    weight = weight.float()
    error = rtn(weight, scheme).dequantize() - weight
    by_row = ((error @ inputs) * error).sum(1)
    return 0.5 * float(outputs.double() @ by_row.double())
