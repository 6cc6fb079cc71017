"""AutoRound (Cheng et al. 2023, "Optimize weight rounding via signed gradient descent", arXiv
2309.05516): learn integers and scales by the output error of a block. Weights are those of linear
layers and convolutions, each a matrix (out, in).

Every integer is the rounding of a latent (W / s + zero_point + V in the paper's letters),

    value = (round(latent) - zero_point) * s

and each step moves every latent, scale and norm weight against the sign of its gradient, which
passes through round unchanged. The loss is the squared error of the block's output. The target is
usually the float model's output at that place, while the inputs are the quantized model's, so that
errors of earlier blocks are corrected too. Steps shrink linearly to 0; by default a latent can move
half a step in total.

The result is the best state measured on all inputs, including the start, so that the loss never
rises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from optimizer.compress.methods.weights.borrow import borrow_weights, copy_norm_weights
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.foundation.qtensor import QTensor, to_signed_scale_grid
from optimizer.foundation.sections.method_options import AutoroundOptions

Weighted = nn.Linear | nn.Conv2d
CHECKS = 2  # measurements of the loss on all samples, after the start
FOUR_BITS = 7  # the largest integer that StepSizes.scales is for
# Start of a latent between its integer (0) and the exact value (1). At 1 the first step would undo
# every rounding of the start that is not to nearest.
OFFSET = 0.5


@dataclass(frozen=True)
class BlockSamples:
    """Training data of a block whose rounding AutoRound learns, one entry per batch.

    hidden, target: (batch, sequence, features); any shape where real is None
    real: (batch, sequence) bool, the tokens that are not padding; None: no padding
    device: device of the block, to which the data of a batch move while it is used
    """

    hidden: Sequence[Tensor]
    target: Sequence[Tensor]
    real: Sequence[Tensor] | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def deviation(self, i: int, output: Tensor) -> Tensor:
        """Compute the difference of the rounded block's output for batch i from its target, without
        padding."""
        target = self.target[i].to(self.device).float()
        return self._without_padding(i, output.float() - target)

    def energy(self, i: int) -> float:
        """Compute the sum of squares of the target of batch i, without padding, to which errors are
        relative."""
        target = self._without_padding(i, self.target[i].float())
        return float(target.square().sum(dtype=torch.float64))

    def _without_padding(self, i: int, values: Tensor) -> Tensor:
        return values if self.real is None else values[self.real[i].to(values.device)]


@dataclass(frozen=True)
class StepSizes:
    """Sizes of AutoRound's first training step; all shrink linearly to 0.

    integers: step of latents, in integers; None: 1 / number of steps
    scales: relative step of scales of 4-bit integers, see scale_rate
    norm_weights: step relative to their mean magnitude
    """

    integers: float | None = None
    scales: float = 5e-4
    norm_weights: float = 5e-4

    def scale_rate(self, highest: int) -> float:
        """Relative step of a scale: the largest integer's value moves no further than in 4 bits.

        highest: largest integer
        """
        return self.scales * FOUR_BITS / max(FOUR_BITS, highest)


@dataclass(frozen=True)
class Block:
    """A block of the model whose rounding AutoRound learns.

    output: (i, hidden) -> output for the hidden states of batch i, using `modules` and
        `norm_weights`, whose float weights are restored after learning
    weights: {module: matrix (out, in) to round}, its weight reshaped, and divided by the factor of
        its input if there is one
    """

    output: Callable[[int, Tensor], Tensor]
    modules: Mapping[str, Weighted]
    weights: Mapping[str, Tensor]
    norm_weights: Mapping[str, nn.Parameter]


def learn_rounding(
    block: Block,
    start: Mapping[str, QTensor],
    samples: BlockSamples,
    options: AutoroundOptions,
    *,
    rates: StepSizes = StepSizes(),
    dtype: torch.dtype = torch.bfloat16,
) -> Tuned:
    """Learn by AutoRound integers and scales of a block's modules, from `start` on.

    start: {module: quantized weight}
    dtype: type of the products

    A module that the output does not depend on, or only through an operator without a gradient, is
    not in the result. Its losses are squared error over the target's energy, on all samples. Raises
    ValueError when `start` does not name exactly the modules, or a loss is not finite.
    """
    run, modules, norm_weights = block.output, block.modules, block.norm_weights
    steps = options.steps
    if set(start) != set(modules):
        raise ValueError(f"start: {sorted(start)}; must name {sorted(modules)}")
    rounding = {n: _Latent(modules[n], block.weights[n], q, dtype) for n, q in start.items()}
    at = {max(1, round(steps * k / CHECKS)) for k in range(1, CHECKS + 1)} if steps else set()
    order = _order(len(samples.hidden), steps, options.seed)
    with borrow_weights(modules, norm_weights):
        for latent in rounding.values():
            latent.place()
        before = _loss(run, samples, dtype)
        best = _State(
            before, {n: r.quantized() for n, r in rounding.items()}, copy_norm_weights(norm_weights)
        )
        for step, i in enumerate(order, 1):
            _gradients(run, samples, i, dtype)
            share = 1 - (step - 1) / steps
            with torch.no_grad():
                for latent in rounding.values():
                    scales = rates.scale_rate(latent.scheme.high)
                    latent.step(share * (rates.integers or 1 / steps), share * scales)
                for gain in norm_weights.values():
                    _step_gain(gain, share * rates.norm_weights)
            if step in at and (now := _loss(run, samples, dtype)) < best.loss:
                integers = {n: r.quantized() for n, r in rounding.items()}
                best = _State(now, integers, copy_norm_weights(norm_weights))
    learned = {n: q for n, q in best.weights.items() if rounding[n].learned or not steps}
    return Tuned(learned, best.norm_weights, before, best.loss)


@dataclass(frozen=True)
class _State:
    loss: float
    weights: dict[str, QTensor]
    norm_weights: dict[str, Tensor] = field(default_factory=dict)


class _Latent:
    """Learned float values (latents) of one module's integers, and its scales, during AutoRound."""

    def __init__(
        self, module: Weighted, weight: Tensor, start: QTensor, dtype: torch.dtype
    ) -> None:
        self.module, self.scheme, self.dtype = module, start.scheme, dtype
        self.scale, self.zero_point, zero = start.scale, start.zero_point, start.zero_point
        self.shape = start.integers.shape
        self.zero = self.scale.new_zeros(1) if zero is None else zero.float()[..., None]
        integers = start.integers.float().reshape(*self.scale.shape, -1)
        exact = weight.detach().float().reshape(integers.shape) / self.scale[..., None]
        self.latent = integers + OFFSET * (exact + self.zero - integers).clamp(-0.5, 0.5)
        self.integers, self.learned = integers, False

    def place(self) -> None:
        """Give the module its present de-quantized values, as a leaf with a gradient."""
        self.integers = self.latent.round().clamp_(self.scheme.low, self.scheme.high)
        value = (self.integers - self.zero) * to_signed_scale_grid(self.scale)[..., None]
        shaped = value.reshape(self.module.weight.shape)
        self.module.weight = nn.Parameter(shaped.to(self.dtype))

    def step(self, integers: float, scales: float) -> None:
        """Move latents and scales against the sign of their gradient, and place the result."""
        if self.module.weight.grad is None:
            return
        self.learned = True
        gradient = self.module.weight.grad.float().reshape(self.integers.shape)
        slope = (gradient * (self.integers - self.zero)).sum(-1)
        sign = self.scale.sign()
        self.latent.sub_(gradient.mul_(sign[..., None]).sign_(), alpha=integers)
        self.latent.clamp_(self.scheme.low - 0.5, self.scheme.high + 0.5)
        self.scale = self.scale * torch.exp(-scales * sign * slope.sign())
        self.place()

    def quantized(self) -> QTensor:
        integers = self.integers.reshape(self.shape).to(torch.int8)
        return QTensor(integers, to_signed_scale_grid(self.scale), self.zero_point, self.scheme)


def _step_gain(gain: nn.Parameter, rate: float) -> None:
    if gain.grad is not None:
        gain.sub_(gain.grad.sign(), alpha=rate * float(gain.abs().mean()))
        gain.grad = None


def _order(batches: int, steps: int, seed: int) -> list[int]:
    """Draw the batch of each of AutoRound's training steps: epochs in random order."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(batches, generator=generator) for _ in range(-(-steps // batches))]
    return torch.cat(rounds).tolist()[:steps] if rounds else []


def _deviation(
    run: Callable[[int, Tensor], Tensor], samples: BlockSamples, i: int, dtype: torch.dtype
) -> Tensor:
    """Run the rounded block on batch i, and compute the difference (float32) of its output from the
    target."""
    hidden = samples.hidden[i].to(samples.device)
    with torch.autocast(samples.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = run(i, hidden)
    return samples.deviation(i, output)


def _gradients(
    run: Callable[[int, Tensor], Tensor], samples: BlockSamples, i: int, dtype: torch.dtype
) -> None:
    """Backpropagate the rounded block's mean squared error of batch i; only signs are used."""
    with torch.enable_grad():
        error = _deviation(run, samples, i, dtype).square().mean()
        if error.requires_grad:
            torch.autograd.backward([error])


def _loss(run: Callable[[int, Tensor], Tensor], samples: BlockSamples, dtype: torch.dtype) -> float:
    """Compute the squared error of the rounded block over all samples, divided by the energy of
    their targets."""
    error = energy = 0.0
    with torch.no_grad():
        for i in range(len(samples.target)):
            error += float(_deviation(run, samples, i, dtype).square().sum(dtype=torch.float64))
            energy += samples.energy(i)
    if not math.isfinite(error) or not math.isfinite(energy):
        raise ValueError("samples: the block's output or its target holds NaN or infinity")
    return error / energy if energy else error
