"""The bias takes back what rounding shifts, and not what clipping cuts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.bias_correction import correct
from optimizer.compress.simulate import QuantConvolution, QuantLinear
from optimizer.compress.walk import blocks as walk
from optimizer.foundation.state import Range
from optimizer.model.architectures.families import FAMILIES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.linear.weight.copy_(torch.eye(4))
        self.linear.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)  # type: ignore[no-any-return]


def corrected_bias(hidden: Tensor, covered: Range) -> Tensor:
    model = nn.Module()
    model.block = Block()
    q = QuantLinear(torch.eye(4), torch.zeros(4), "tensor", covered)
    real = torch.ones(hidden.shape[:2], dtype=torch.bool)
    stream = walk.CalibrationStream([hidden], [real], [[walk.BlockUse("block", (), {})]])
    group = walk.BlockGroup(model, FAMILIES["bert"], stream, range(1), ("block",), {})
    biases, corrections, _ = correct(group, {"block.linear": q})
    assert torch.equal(corrections["block.linear.bias"], biases["block.linear.bias"])
    return biases["block.linear.bias"]


def test_values_on_one_side_of_a_code_are_put_back() -> None:
    covered = Range.symmetric(127.0)  # a step of 1
    assert torch.allclose(corrected_bias(torch.full((1, 8, 4), 0.3), covered), torch.tensor(0.3))


def test_a_clipped_outlier_does_not_shift_the_other_tokens() -> None:
    hidden = torch.zeros(1, 8, 4)
    hidden[0, 0] = 1e6
    assert not corrected_bias(hidden, Range.symmetric(127.0)).any()


def test_of_a_convolution_the_mean_is_that_of_all_places_and_images() -> None:
    """Its weight is rounded by a quarter, and its inputs have a mean."""
    convolution = nn.Conv2d(2, 3, 3, padding=1).requires_grad_(False)
    q = QuantConvolution(convolution.weight.flatten(1) + 0.25, convolution, None, None)
    model, images = nn.Module(), torch.rand(4, 2, 6, 5)
    model.block = nn.Sequential(convolution)
    stream = walk.CalibrationStream(
        [images], [torch.ones(4, 1, dtype=torch.bool)], [[walk.BlockUse("block", (), {})]]
    )
    group = walk.BlockGroup(model, FAMILIES["resnet"], stream, range(1), ("block",), {})
    biases, _, _ = correct(group, {"block.0": q})
    lost = convolution(images) - nn.functional.conv2d(
        images, convolution.weight + 0.25, convolution.bias, padding=1
    )
    expected = convolution.bias + lost.mean((0, 2, 3))
    torch.testing.assert_close(biases["block.0.bias"], expected, rtol=1e-4, atol=1e-5)
