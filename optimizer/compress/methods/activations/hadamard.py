"""Orthogonal matrices that spread each feature over all features.

A Hadamard matrix has entries +-1 and orthogonal rows. Supported orders: 1, 2, q + 1 for a prime
q = 3 mod 4 and 2 (q + 1) for a prime q = 1 mod 4 (Paley 1933), and products of those with powers
of two (Sylvester): 576 = 16 * 36, 1536 = 128 * 12, 896 = 32 * 28.
"""

from __future__ import annotations

import torch
from torch import Tensor


def make_orthogonal(size: int, seed: int) -> Tensor:
    """Make a rotation of features against outliers, an orthogonal matrix (size, size) float64:
    Hadamard, with seeded random signs of its columns.

    If no Hadamard order fits, a random rotation replaces the odd part: 80 = 4 * 20 is Hadamard,
    6 = 2 * (random rotation of 3).
    """
    generator = torch.Generator().manual_seed(seed)
    core = 1
    while size % (2 * core) == 0:
        core *= 2
    matrix = make_hadamard(size)
    if matrix is None:
        normal = torch.randn(size // core, size // core, generator=generator, dtype=torch.float64)
        rotation, triangle = torch.linalg.qr(normal)
        even = make_hadamard(core)
        assert even is not None
        matrix = torch.kron(even, (rotation * triangle.diagonal().sign()).contiguous())
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return matrix / matrix.square().sum(1, keepdim=True).sqrt() * signs


def make_hadamard(size: int) -> Tensor | None:
    """Make a Hadamard matrix (size, size) float64 to rotate features, or None where `size` is not a
    supported order."""
    core = size
    while core > 1:
        matrix = make_paley(core)
        if matrix is not None:
            return torch.kron(_sylvester(size // core), matrix)
        if core % 2:
            return None
        core //= 2
    return _sylvester(size) if size else None


def make_paley(size: int) -> Tensor | None:
    """Make a Hadamard matrix (size, size) of Paley's first or second construction, to rotate
    features; None: no such size."""
    if size % 4 == 0 and _prime(size - 1):
        skew = _bordered(size - 1, -1.0)
        return skew + torch.eye(size, dtype=torch.float64)
    half = size // 2
    if size % 4 == 0 and half % 4 == 2 and _prime(half - 1):
        plus = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        minus = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        eye = torch.eye(half, dtype=torch.float64)
        return torch.kron(_bordered(half - 1, 1.0), plus) + torch.kron(eye, minus)
    return None


def _bordered(prime: int, first: float) -> Tensor:
    """Make for a Hadamard matrix Jacobsthal's matrix chi(i - j) of a prime, with a row of 1 and a
    column of `first`."""
    squares = {i * i % prime for i in range(1, prime)}
    chi = torch.tensor([0.0] + [1.0 if i in squares else -1.0 for i in range(1, prime)])
    index = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[1:, 1:] = chi[(index[:, None] - index[None, :]) % prime]
    matrix[0, 1:], matrix[1:, 0] = 1.0, first
    return matrix


def _sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    step = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(step, matrix)
    return matrix


def _prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, int(n**0.5) + 1))
