"""Learned rounding (after Cheng et al. 2023, "Optimize weight rounding via signed gradient
descent", arXiv 2309.05516): choose codes and scales together, for what a whole block puts out. The
weights are those of linear layers and of convolutions, each a matrix (out, in).

Every code is the rounding of a latent in units of the scale,

    value = (round(latent) - zero_point) * scale

and each step moves every latent, every scale and every gain against the sign of its gradient,
which passes through round unchanged. The loss is the squared error of the block's output against
a target, usually the float model's output at that place while the inputs are the quantized
model's, so that a block also repairs what the blocks before it spoilt. Steps shrink linearly to
nothing; with the default rate a latent can move half a code in all.

One block and its inputs are needed, nothing else. The state returned is the best of those measured
on all inputs, the start among them: the loss never ends above its start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optimizer.compress.methods.weights.borrowed import borrowed, copied
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.foundation.qtensor import QTensor, to_signed_scale_grid
from optimizer.foundation.sections.method_options import AutoroundOptions

Weighted = nn.Linear | nn.Conv2d
FOUR_BITS = 7  # the largest integer that Rates.scales is for
# How far a latent starts from its code, as a share of the way to the exact value. 1 would put
# values that their start rounded away from the nearest code where the first step flips them back.
OFFSET = 0.5


@dataclass(frozen=True)
class Samples:
    """What a block is trained on, an entry per batch: hidden and target (batch, sequence,
    features), and real (batch, sequence) bool, the tokens that are not padding. Without `real`
    nothing is, and hidden and target have any shapes."""

    hidden: Sequence[Tensor]
    target: Sequence[Tensor]
    real: Sequence[Tensor] | None = None

    def deviation(self, i: int, output: Tensor) -> Tensor:
        """What an output for batch i is off by, where it is not padding."""
        return self._kept(i, output.float() - self.target[i].float())

    def energy(self, i: int) -> float:
        """Of the target of batch i, where it is not padding."""
        target = self._kept(i, self.target[i].float())
        return float(target.square().sum(dtype=torch.float64))

    def _kept(self, i: int, values: Tensor) -> Tensor:
        return values if self.real is None else values[self.real[i]]


@dataclass(frozen=True)
class Rates:
    """The first step of each kind; all shrink linearly to nothing.

    codes: in codes; None means 1 / steps. scales: relative to the scale, of integers up to 7; of
    larger ones less (scale_rate). norm_weights: relative to their mean magnitude.
    """

    codes: float | None = None
    scales: float = 5e-4
    norm_weights: float = 5e-4

    def scale_rate(self, highest: int) -> float:
        """Relative to the scale: no further than the largest integer's value moves in 4 bits, which
        are a few thousandths of a step. (Of 127 steps as large a share would be a whole one after
        some steps, and hide what integers learn.)"""
        return self.scales * FOUR_BITS / max(FOUR_BITS, highest)


@dataclass(frozen=True)
class Block:
    """output(i, hidden): the block's output for the hidden states of batch i, using `modules` and
    `norm_weights`, which hold float weights and hold them again after learning. weights: the matrix
    (out, in) of each module that is rounded, which its own weight is a reshaping of or, where its
    input is multiplied by a factor, that weight divided by it."""

    output: Callable[[int, Tensor], Tensor]
    modules: Mapping[str, Weighted]
    weights: Mapping[str, Tensor]
    norm_weights: Mapping[str, nn.Parameter]


def learn_rounding(
    block: Block,
    start: Mapping[str, QTensor],
    samples: Samples,
    options: AutoroundOptions,
    *,
    rates: Rates = Rates(),
    checks: int = 2,
    dtype: torch.dtype = torch.bfloat16,
) -> Tuned:
    """Learn integers and scales of a block's modules, from `start` on.

    start: {module: integers}
    checks: times the loss is measured on all samples, after the start
    dtype: type of the products

    The losses in the result are squared error over the target's energy, on all samples. Raises
    ValueError when `start` does not name exactly the modules, or a loss is not finite.
    """
    run, modules, norm_weights = block.output, block.modules, block.norm_weights
    steps = options.steps
    if set(start) != set(modules):
        raise ValueError(f"start: {sorted(start)}; must name {sorted(modules)}")
    rounding = {n: _Latent(modules[n], block.weights[n], q, dtype) for n, q in start.items()}
    at = {max(1, round(steps * k / checks)) for k in range(1, checks + 1)} if steps else set()
    order = _order(len(samples.hidden), steps, options.seed)
    with borrowed(modules, norm_weights):
        for latent in rounding.values():
            latent.place()
        before = _loss(run, samples, dtype)
        best = _State(before, {n: r.quantized() for n, r in rounding.items()}, copied(norm_weights))
        for step, i in enumerate(order, 1):
            _gradients(run, samples, i, dtype)
            share = 1 - (step - 1) / steps
            with torch.no_grad():
                for latent in rounding.values():
                    scales = rates.scale_rate(latent.scheme.high)
                    latent.step(share * (rates.codes or 1 / steps), share * scales)
                for gain in norm_weights.values():
                    _step_gain(gain, share * rates.norm_weights)
            if step in at and (now := _loss(run, samples, dtype)) < best.loss:
                codes = {n: r.quantized() for n, r in rounding.items()}
                best = _State(now, codes, copied(norm_weights))
    return Tuned(best.weights, best.norm_weights, before, best.loss)


@dataclass(frozen=True)
class _State:
    loss: float
    weights: dict[str, QTensor]
    norm_weights: dict[str, Tensor] = field(default_factory=dict)


class _Latent:
    """The codes and scales of one module while they are learned. weight (out, in): what its
    integers stand for."""

    def __init__(
        self, module: Weighted, weight: Tensor, start: QTensor, dtype: torch.dtype
    ) -> None:
        self.module, self.scheme, self.dtype = module, start.scheme, dtype
        self.shape, self.scale, self.zero_point = (
            start.integers.shape,
            start.scale,
            start.zero_point,
        )
        zero = start.zero_point
        self.zero = torch.zeros(1) if zero is None else zero.float()[..., None]
        codes = start.integers.float().reshape(*self.scale.shape, -1)
        exact = weight.detach().float().reshape(codes.shape) / self.scale[..., None]
        self.latent = codes + OFFSET * (exact + self.zero - codes).clamp(-0.5, 0.5)
        self.integers = codes

    def place(self) -> None:
        """Give the module the values coded now, as a leaf that takes a gradient."""
        self.integers = self.latent.round().clamp_(self.scheme.low, self.scheme.high)
        value = (self.integers - self.zero) * to_signed_scale_grid(self.scale)[..., None]
        shaped = value.reshape(self.module.weight.shape)
        self.module.weight = nn.Parameter(shaped.to(self.dtype))

    def step(self, codes: float, scales: float) -> None:
        """Move against the sign of the gradient of the module's weight, and place the result."""
        assert self.module.weight.grad is not None
        gradient = self.module.weight.grad.float().reshape(self.integers.shape)
        slope = (gradient * (self.integers - self.zero)).sum(-1)
        sign = self.scale.sign()
        self.latent.sub_(gradient.mul_(sign[..., None]).sign_(), alpha=codes)
        self.latent.clamp_(self.scheme.low - 0.5, self.scheme.high + 0.5)
        self.scale = self.scale * torch.exp(-scales * sign * slope.sign())
        self.place()

    def quantized(self) -> QTensor:
        codes = self.integers.reshape(self.shape).to(torch.int8)
        return QTensor(codes, to_signed_scale_grid(self.scale), self.zero_point, self.scheme)


def _step_gain(gain: nn.Parameter, rate: float) -> None:
    if gain.grad is not None:
        gain.sub_(gain.grad.sign(), alpha=rate * float(gain.abs().mean()))
        gain.grad = None


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """The batch of each step: every batch once, in a new random order, before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(batches, generator=generator) for _ in range(-(-steps // batches))]
    return torch.cat(rounds).tolist()[:steps] if rounds else []


def _deviation(
    run: Callable[[int, Tensor], Tensor], samples: Samples, i: int, dtype: torch.dtype
) -> Tensor:
    """What the block is off by on batch i, float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = run(i, samples.hidden[i])
    return samples.deviation(i, output)


def _gradients(
    run: Callable[[int, Tensor], Tensor], samples: Samples, i: int, dtype: torch.dtype
) -> None:
    """Backpropagate the squared error of batch i; its size does not matter, only signs do."""
    with torch.enable_grad():
        torch.autograd.backward([_deviation(run, samples, i, dtype).square().mean()])


def _loss(run: Callable[[int, Tensor], Tensor], samples: Samples, dtype: torch.dtype) -> float:
    """Squared error over the target's energy, on all samples."""
    error = energy = 0.0
    with torch.no_grad():
        for i in range(len(samples.target)):
            error += float(_deviation(run, samples, i, dtype).square().sum(dtype=torch.float64))
            energy += samples.energy(i)
    if not math.isfinite(error) or not math.isfinite(energy):
        raise ValueError("samples: the block's output or its target holds NaN or infinity")
    return error / energy if energy else error
