"""Forward the state's own bits; backward LSQ's gradient."""

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.weights import straight_through as ste
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import fake_quantize
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.state import Range

SCHEMES = [
    Scheme(8),
    Scheme(4, granularity="group", group_size=16),
    Scheme(4, symmetric=False, granularity="group", group_size=16),
    Scheme(8, granularity="tensor"),
]


def heavy(*shape: int, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.distributions.StudentT(3.0).sample(shape)


@pytest.fixture(params=SCHEMES, ids=str)
def start(request: pytest.FixtureRequest) -> QTensor:
    return rtn(heavy(24, 64), request.param)


def test_weights_start_as_the_integers_they_had(start: QTensor) -> None:
    weight = start.dequantize()
    scale = ste.scale_of(start.scale, torch.zeros_like(start.scale))
    assert torch.equal(ste.quantize_weight(weight, scale, start).integers, start.integers)
    assert torch.equal(ste.fake_quantize_weight(weight, scale, start), start.dequantize())


def test_less_than_half_a_step_changes_no_integer(start: QTensor) -> None:
    scale = ste.scale_of(start.scale, torch.zeros_like(start.scale))
    out, groups = len(start.integers), start.scale.shape[1]
    step = scale.expand(out, groups)[..., None].expand(out, groups, 64 // groups).reshape(24, 64)
    for moved in (0.4 * step, -0.4 * step):
        weight = start.dequantize() + moved
        assert torch.equal(ste.quantize_weight(weight, scale, start).integers, start.integers)


def test_what_is_multiplied_is_what_the_state_will_hold(start: QTensor) -> None:
    weight = heavy(24, 64, seed=3)
    scale = ste.scale_of(start.scale, 0.3 * heavy(*start.scale.shape, seed=4).tanh())
    values = ste.fake_quantize_weight(weight, scale, start)
    assert torch.equal(values, ste.quantize_weight(weight, scale, start).dequantize())


def test_a_scale_has_the_gradient_of_lsq() -> None:
    start = rtn(heavy(24, 64), SCHEMES[1])
    weight = (2 * heavy(24, 64)).requires_grad_()  # some beyond the integers
    logarithm = torch.zeros_like(start.scale).requires_grad_()
    above = heavy(24, 64, seed=5)
    (
        ste.fake_quantize_weight(weight, ste.scale_of(start.scale, logarithm), start) * above
    ).sum().backward()
    steps = weight.detach().reshape(24, 4, 16) / start.scale[..., None]
    inside = steps.round().abs() <= start.scheme.high
    lsq = torch.where(inside, steps.round() - steps, steps.round().clamp(-7, 7))
    expected = (lsq * above.reshape(24, 4, 16)).sum(-1) * start.scale
    assert logarithm.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(logarithm.grad, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad, above * inside.reshape(24, 64))


RANGES = [Range(-1.7, 4.2), Range(0.0, 6.0), Range.symmetric(3.0)]


@pytest.mark.parametrize("covered", RANGES, ids=str)
def test_activations_are_coded_as_in_the_state(covered: Range) -> None:
    x, start = heavy(50, 8), ste.start_logarithms(covered)
    for logarithms in (start, start + torch.tensor([0.2, -0.1])[: len(start)]):
        expected = fake_quantize(x, ste.scale_range(covered, logarithms))
        assert torch.equal(ste.fake_quantize_activation(x, covered, logarithms), expected)
    assert ste.scale_range(covered, start) == covered


def test_a_symmetric_range_stays_symmetric() -> None:
    start = Range.symmetric(3.0)
    for logarithm in torch.linspace(-2, 2, 50):
        assert ste.scale_range(start, logarithm[None]).zero_point == 128


@pytest.mark.parametrize("covered", RANGES, ids=str)
def test_a_range_that_clips_what_matters_grows(covered: Range) -> None:
    """Squared error falls along the gradient of the range's ends."""
    x = 10 * heavy(4000, 1)
    logarithms = ste.start_logarithms(covered).requires_grad_()

    def error(at: Tensor) -> Tensor:
        return (ste.fake_quantize_activation(x, covered, at) - x).square().mean()

    before = error(logarithms)
    before.backward()
    assert logarithms.grad is not None
    after = error(logarithms.detach() - 0.05 * logarithms.grad / logarithms.grad.norm())
    assert after < before


def test_values_inside_a_range_keep_their_gradient_and_others_have_none() -> None:
    covered = Range(-1.0, 2.0)
    x = torch.tensor([-5.0, -0.5, 0.0, 1.5, 9.0], requires_grad=True)
    ste.fake_quantize_activation(x, covered, torch.zeros(2)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]
