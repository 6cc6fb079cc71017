"""What rounding a weight is predicted to cost the model, in nats per token.

With N the gradient of the log-probability of a text by one weight (out, in), texts being drawn from
the model's own distribution and of T tokens together, a change D of the weight costs to second
order

    KL(float || changed) = 1/(2T) sum <D, N>^2 = 1/2 tr(G D A D^T)
        G = diag(sum N N^T) / T     A = sum N^T N / sum |N|^2

the second where the entries of D are as good as independent and N's squares are a product of what
belongs to the output and what belongs to the input (in the manner of Shampoo, and of YAQA, Tseng et
al. 2025, arXiv 2505.22988). N is taken of whole texts: its tokens do not err by themselves
(docs/decisions/0024).

D is the error of rounding to nearest, whatever rounds in the end: GPTQ leaves less of it, and is
taken to leave the same share everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from optimizer.compress.methods.precision.language_model import Batch, LanguageModel
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import Scheme

SLICE = 512  # tokens whose logits exist at a time


class Curvature:
    """G and A of one weight, from the texts seen."""

    def __init__(self, out: int, inputs: int) -> None:
        self._by_output, self._by_input = torch.zeros(out), torch.zeros(inputs, inputs)
        self._tokens = 0

    def add(self, slopes: Tensor, rows: Tensor) -> None:
        """One text: the gradients at its tokens' outputs (tokens, out), and the inputs that the
        tokens had (tokens, in)."""
        gradient = slopes.T @ rows
        self._by_output += gradient.square().sum(1)
        self._by_input.addmm_(gradient.T, gradient)
        self._tokens += len(rows)

    @property
    def outputs(self) -> Tensor:
        """The diagonal of G (out,)."""
        return self._by_output / max(self._tokens, 1)

    @property
    def inputs(self) -> Tensor:
        """A (in, in); zero where the weight has no say."""
        whole = float(self._by_input.trace())
        return self._by_input / (whole or 1.0)


def output_slopes(
    model: LanguageModel,
    texts: Iterable[Batch],
    keep: Callable[[str, Tensor], None],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """keep(module, slopes) for each module and text: the gradient of minus the text's
    log-probability at the module's output, (real tokens, out) float32.

    texts: batches of one. What follows each token is drawn anew. dtype: that of the products.
    Raises ValueError naming a
    module that had no part in the answer, or whose gradient is not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    head, linears = model.head.detach().to(dtype), model.linears
    seen: dict[str, Tensor] = {}
    handles = [m.register_forward_hook(_watch(n, seen)) for n, m in linears.items()]
    try:
        for text in texts:
            real = text["attention_mask"].bool()
            with (
                torch.enable_grad(),
                torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16),
            ):
                rows = model.features(text)[real]
            slope = torch.cat([_drawn(r, head, generator) for r in rows.detach().split(SLICE)])
            torch.autograd.backward([rows], [slope.to(rows.dtype)])
            for name in linears:
                if name not in seen:
                    raise ValueError(f"{name}: its output has no part in the answer")
                gradient = seen.pop(name).float().flatten(0, -2)[real.reshape(-1)]
                if not bool(torch.isfinite(gradient).all()):
                    raise ValueError(f"{name}: its gradient holds NaN or infinity")
                keep(name, gradient)
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, seen: dict[str, Tensor]) -> Callable[..., None]:
    """A forward hook that puts the gradient at the module's output into `seen`."""

    def put(slope: Tensor) -> None:
        seen[name] = slope.detach()

    def hook(_module: nn.Module, _args: object, out: Tensor) -> None:
        if not out.requires_grad:  # nothing before it takes a gradient: it starts here
            out.requires_grad_(True)
        out.register_hook(put)

    return hook


def _drawn(rows: Tensor, head: Tensor, generator: torch.Generator) -> Tensor:
    """d(-log p(y)) / d row of (tokens, features) for next tokens y drawn from p."""
    chances = (rows.to(head.dtype) @ head.T).float().softmax(-1)
    drawn = torch.multinomial(chances, 1, generator=generator)
    chances.scatter_add_(1, drawn, -torch.ones_like(drawn, dtype=torch.float32))
    return (chances.to(head.dtype) @ head).float()


def predicted(weight: Tensor, scheme: Scheme, outputs: Tensor, inputs: Tensor) -> float:
    """Nats per token that rounding `weight` (out, in) by `scheme` to nearest costs.

    outputs (out,): the diagonal of G; inputs (in, in): A. Raises ValueError for NaN or infinity in
    weight.
    """
    weight = weight.float()
    error = rtn(weight, scheme).dequantize() - weight
    by_row = ((error @ inputs) * error).sum(1)
    return 0.5 * float(outputs.double() @ by_row.double())
