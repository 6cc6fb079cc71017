"""Hadamard matrices and the rotations made from them."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.activations.hadamard import make_hadamard, make_orthogonal


@pytest.mark.parametrize("size", [1, 2, 4, 12, 20, 28, 36, 64, 96, 576])
def test_a_hadamard_matrix_has_orthogonal_rows_of_plus_and_minus_one(size: int) -> None:
    matrix = make_hadamard(size)
    assert matrix is not None
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [6, 9, 576, 100])
def test_a_rotation_is_orthogonal_and_follows_its_seed(size: int) -> None:
    rotation = make_orthogonal(size, seed=3)
    assert torch.allclose(rotation @ rotation.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(rotation, make_orthogonal(size, seed=3))
    assert not torch.equal(rotation, make_orthogonal(size, seed=4))


def test_a_rotation_spreads_one_feature_evenly_over_all() -> None:
    assert torch.allclose(
        make_orthogonal(576, 0)[7].abs(), torch.tensor(1 / 24, dtype=torch.float64)
    )
