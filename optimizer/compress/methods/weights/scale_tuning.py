"""Tune the scales and norm weights of a quantized model towards the float model's logits.

The loss is KL(float || quantized) of the next token, in nats, mean over real tokens. Integers and
zero points stay: a scale is s = start * exp(t), put on the scale grid before use, and t follows
Adam (Kingma and Ba 2015), as do the norm weights; this is the second phase of EfficientQAT (Chen
et al. 2024, arXiv 2407.11062) with the float model as the teacher.

Unlike the walk over the blocks this needs the whole model in memory: one copy of its weights in
`dtype`, one gradient of that size, the activations of one batch, and the float model's last hidden
states, from which its logits are recomputed.

The result is the best state on held-out batches, including the start, so that the held-out loss
never rises. The method that chose the start must not have seen these batches either, or any change
would look like a loss (docs/decisions/0025).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress.methods.precision.language_model import Batch, LanguageModel
from optimizer.compress.methods.weights.borrow import borrow_weights, copy_norm_weights
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.foundation.qtensor import QTensor, to_signed_scale_grid
from optimizer.foundation.sections.method_options import ScaleTuningOptions

BETAS, EPSILON = (0.9, 0.95), 1e-15


@dataclass(frozen=True)
class LearningRates:
    """Adam's learning rates of scale tuning: relative for scales, in units of the mean magnitude
    for norm_weights. Both decay linearly to 0."""

    scales: float = 1e-3
    norm_weights: float = 1e-3


@dataclass(frozen=True)
class TuningSettings:
    """Settings of scale tuning: learning rates, and the type of the products."""

    rates: LearningRates = LearningRates()
    dtype: torch.dtype = torch.bfloat16


def tune_scales(
    model: LanguageModel,
    start: Mapping[str, QTensor],
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    options: ScaleTuningOptions,
    training: TuningSettings = TuningSettings(),
) -> Tuned:
    """Tune scales and norm weights of a quantized model towards the float model's logits, from
    `start` on.

    model: float weights in linears and norms, which make it the teacher; unchanged afterwards
    start: {linear: quantized weight}

    The losses in the result are the held-out KL in nats per token. Raises ValueError when
    `start` does not name exactly the linears, nothing is held out, or a loss is not finite.
    """
    linears, norm_weights = model.linears, model.norm_weights
    epochs, batch_size, dtype = options.epochs, options.batch_size, training.dtype
    if set(start) != set(linears):
        raise ValueError(f"start: {sorted(start)}; must name {sorted(linears)}")
    if not held_out:
        raise ValueError("held_out: empty; at least one batch is needed to choose by")
    see = _HiddenStates(model.features, model.head.detach().to(dtype), dtype)
    teacher, judge = see.answers(batches), see.answers(held_out)
    scales = {name: _Scales(linears[name], q, dtype) for name, q in start.items()}
    steps = epochs * -(-len(batches) // batch_size)
    generator = torch.Generator().manual_seed(options.seed)
    with borrow_weights(linears, norm_weights):
        for s in scales.values():
            s.place()
        before = best = see.loss(held_out, judge)
        kept = _snapshot(scales, norm_weights)
        adam = _adam(scales, norm_weights, training.rates)
        shrink = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 - step / steps)
        for _ in range(epochs):
            for pick in torch.randperm(len(batches), generator=generator).split(batch_size):
                for i in pick.tolist():
                    see.gradients(batches[i], teacher[i], 1 / len(pick))
                for s in scales.values():
                    s.take_gradient()
                adam.step()
                adam.zero_grad()
                shrink.step()
                for s in scales.values():
                    s.place()
            if (now := see.loss(held_out, judge)) < best:
                best, kept = now, _snapshot(scales, norm_weights)
    return Tuned(*kept, before, best)


class _Scales:
    """Scales of one quantized linear during their tuning; `log` is the parameter of Adam."""

    def __init__(self, linear: nn.Linear, start: QTensor, dtype: torch.dtype) -> None:
        self.linear, self.start, self.dtype = linear, start, dtype
        self.log = nn.Parameter(torch.zeros_like(start.scale))

    def place(self) -> None:
        """Give the quantized linear its present de-quantized values, as a leaf with a gradient."""
        self.linear.weight = nn.Parameter(self.quantized().dequantize().to(self.dtype))

    def take_gradient(self) -> None:
        """Compute for scale tuning the gradient of the loss by the logarithm of each scale: the sum
        of value times gradient over its group."""
        weight = self.linear.weight
        assert weight.grad is not None
        slope = (weight.detach().float() * weight.grad.float()).reshape(*self.log.shape, -1)
        self.log.grad = slope.sum(-1)

    def quantized(self) -> QTensor:
        s = self.start
        scale = to_signed_scale_grid(s.scale * self.log.detach().exp())
        return QTensor(s.integers, scale, s.zero_point, s.scheme)


class _HiddenStates:
    """The model whose scales are tuned, as a function from a batch to the hidden states behind its
    last block, at real tokens."""

    def __init__(
        self, features: Callable[[Batch], Tensor], head: Tensor, dtype: torch.dtype
    ) -> None:
        self._features, self._head, self._dtype = features, head, dtype

    def rows(self, batch: Batch) -> Tensor:
        """Compute hidden states (real tokens, features) float32 of the model whose scales are
        tuned."""
        device = self._head.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
            states = self._features(batch)
            return states[batch["attention_mask"].bool().to(device)].float()

    def answers(self, batches: Sequence[Batch]) -> list[Tensor]:
        with torch.no_grad():
            return [self.rows(batch) for batch in batches]

    def gradients(self, batch: Batch, teacher: Tensor, share: float) -> None:
        """Backpropagate `share` of the mean KL divergence of one batch to scales and norm
        weights."""
        with torch.enable_grad():
            rows = self.rows(batch)
            torch.autograd.backward([_KL.apply(rows, teacher, self._head) * (share / len(rows))])

    def loss(self, batches: Sequence[Batch], teacher: Sequence[Tensor]) -> float:
        """Compute the mean KL divergence of the tuned model's next-token distributions from the
        teacher's, over all real tokens."""
        with torch.no_grad():
            total = sum(
                float(_KL.apply(self.rows(batch), rows, self._head))
                for batch, rows in zip(batches, teacher, strict=True)
            )
        mean = total / sum(len(rows) for rows in teacher)
        if not math.isfinite(mean):
            raise ValueError("held_out: the logits hold NaN or infinity")
        return mean


class _KL(torch.autograd.Function):
    """Sum KL(softmax(teacher head^T) || softmax(rows head^T)) by slices of tokens, whose logits
    alone are in memory. The gradient by a logit is the difference of probabilities."""

    SLICE = 512

    @staticmethod
    def forward(ctx: Any, rows: Tensor, teacher: Tensor, head: Tensor) -> Tensor:
        total, slopes = rows.new_zeros(()), []
        pieces = zip(rows.split(_KL.SLICE), teacher.split(_KL.SLICE), strict=True)
        for student_rows, teacher_rows in pieces:
            q = (student_rows.to(head.dtype) @ head.T).float().log_softmax(-1)
            p = (teacher_rows.to(head.dtype) @ head.T).float().log_softmax(-1)
            chance = p.exp()
            total = total + torch.dot(chance.flatten(), p.sub_(q).flatten())
            if ctx.needs_input_grad[0]:
                slopes.append((q.exp_().sub_(chance).to(head.dtype) @ head).float())
        if slopes:
            ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * above[0], None, None


def _adam(
    scales: Mapping[str, _Scales], norm_weights: Mapping[str, nn.Parameter], rates: LearningRates
) -> torch.optim.Adam:
    """Adam with a learning rate per parameter."""
    groups: list[dict[str, Any]] = [
        {"params": [s.log], "lr": rates.scales} for s in scales.values()
    ]
    groups += [
        {"params": [g], "lr": rates.norm_weights * float(g.detach().abs().mean())}
        for g in norm_weights.values()
    ]
    return torch.optim.Adam(groups, betas=BETAS, eps=EPSILON)


def _snapshot(
    scales: Mapping[str, _Scales], norm_weights: Mapping[str, nn.Parameter]
) -> tuple[dict[str, QTensor], dict[str, Tensor]]:
    return {n: s.quantized() for n, s in scales.items()}, copy_norm_weights(norm_weights)
