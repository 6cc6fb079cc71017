"""A loss is 0 where the student agrees, and the papers' number where it does not."""

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from optimizer.harness.contract import POOLINGS, Contract
from optimizer.harness.tasks.embeddings.sentence_embedding import decode
from optimizer.reduce.methods import losses
from tests.harness import small_model

Loss = Callable[[Tensor, Tensor], Tensor]


def heavy(*shape: int, seed: int = 0) -> Tensor:
    """Student's t with 2.5 degrees of freedom."""
    torch.manual_seed(seed)
    return torch.distributions.StudentT(2.5).sample(shape)


REAL = torch.arange(12)[None] < torch.tensor([[12], [7], [1]])
ON_VECTORS: dict[str, Loss] = {
    "divergence": losses.divergence,
    "direction": losses.direction,
    "relations": losses.relations,
}
ON_STATES: dict[str, Loss] = {
    "hidden": lambda s, t: losses.hidden(s, t, REAL),
    "attention": lambda s, t: losses.attention(
        s.softmax(-1)[:, None], t.softmax(-1)[:, None], REAL
    ),
}
CASES = [(f, (40, 16)) for f in ON_VECTORS.values()] + [
    (f, (3, 12, 16)) for f in ON_STATES.values()
]
NAMES = [*ON_VECTORS, *ON_STATES]


@pytest.mark.parametrize(("loss", "shape"), CASES, ids=NAMES)
def test_a_student_that_agrees_has_no_loss_and_no_gradient(
    loss: Loss, shape: tuple[int, ...]
) -> None:
    student = heavy(*shape).requires_grad_()
    value = loss(student, student.detach().clone())
    value.backward()
    assert value == 0
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-6


@pytest.mark.parametrize(("loss", "shape"), CASES, ids=NAMES)
def test_a_loss_falls_along_its_gradient_and_the_teacher_takes_none(
    loss: Loss, shape: tuple[int, ...]
) -> None:
    student, teacher = heavy(*shape).requires_grad_(), heavy(*shape, seed=1).requires_grad_()
    before = loss(student, teacher)
    before.backward()
    assert teacher.grad is None
    assert student.grad is not None
    stepped = student - 1e-3 * student.grad / student.grad.norm()
    assert loss(stepped, teacher) < before


def test_divergence_is_torch_s_kl_whatever_the_slices() -> None:
    student, teacher = heavy(2500, 9), heavy(2500, 9, seed=1)
    expected = functional.kl_div(
        student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(losses.divergence(student, teacher), expected)


def test_a_temperature_hardly_changes_the_size_of_the_gradient() -> None:
    sizes = []
    for temperature in (4.0, 8.0):
        student = heavy(200, 9).requires_grad_()
        losses.divergence(student, heavy(200, 9, seed=1), temperature).backward()
        assert student.grad is not None
        sizes.append(float(student.grad.norm()))
    assert 0.5 < sizes[0] / sizes[1] < 2


def test_direction_is_one_minus_cosine() -> None:
    student, teacher = heavy(50, 8), heavy(50, 8, seed=1)
    expected = (1 - functional.cosine_similarity(student, teacher)).mean()
    torch.testing.assert_close(losses.direction(student, teacher), expected)


def test_relations_need_no_equal_widths_and_see_no_rotation() -> None:
    teacher = heavy(20, 8)
    rotation = torch.linalg.qr(heavy(8, 8, seed=2))[0]
    wide = torch.cat([teacher @ rotation, torch.zeros(20, 3)], 1)
    assert losses.relations(wide, teacher) < 1e-10
    assert losses.relations(teacher[:1], teacher[:1]) == 0


def test_padding_changes_no_hidden_or_attention_loss() -> None:
    student, teacher = heavy(3, 12, 16), heavy(3, 12, 16, seed=1)
    other = student.clone()
    other[~REAL] = 1e6
    for loss in ON_STATES.values():
        assert loss(other, teacher) == loss(student, teacher)


def test_every_token_counts_alike_in_the_hidden_loss() -> None:
    student, teacher = heavy(1, 12, 16), heavy(1, 12, 16, seed=1)
    real = torch.ones(1, 12, dtype=torch.bool)
    scale = torch.logspace(-3, 3, 12)[None, :, None]
    torch.testing.assert_close(
        losses.hidden(student * scale, teacher * scale, real), losses.hidden(student, teacher, real)
    )


@pytest.mark.parametrize("pooling", [*POOLINGS, ("max", "mean")])
def test_pooling_is_the_harness_s(pooling: str | tuple[str, ...]) -> None:
    states = heavy(3, 12, 16)
    document = small_model.contract(pooling=pooling, normalize=False)
    contract = Contract.from_json(json.loads(json.dumps(document)))
    expected = decode(contract, states.numpy(), REAL.numpy())
    pooled = losses.pool(states, REAL, contract.poolings)
    torch.testing.assert_close(pooled, torch.from_numpy(expected), rtol=1e-5, atol=1e-6)
