"""Choose units by the Fisher information of their masks (Kwon et al. 2022, arXiv 2204.09656):
without training, from gradients of the log-likelihood on calibration text.

With a mask m_u for every unit, 1 when it is kept, removing the units with 1 - m = z costs about
z^T F z / 2, where F = mean over texts of g g^T and g is the gradient by m at m = 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose(gradients: Tensor, keep: int) -> Tensor:
    """Return the units to keep, (keep,), ascending. They start as those with the largest diagonal
    and are then exchanged in pairs while z^T F z falls (the paper's mask rearrangement, with the
    best pair each time).

    gradients: (texts, units)
    """
    G = gradients.double()
    diagonal = G.square().sum(0)
    order = diagonal.argsort(descending=True, stable=True)
    out = torch.ones(G.shape[1], dtype=torch.bool)
    out[order[:keep]] = False
    for _ in range(G.shape[1]):
        if not bool(out.any()) or bool(out.all()):
            break
        total = G[:, out].sum(1)  # (texts,): z^T F z is its squared length
        enters, leaves = (~out).nonzero().reshape(-1), out.nonzero().reshape(-1)
        slope = 2 * total @ G
        # |total + g_i - g_j|^2 - |total|^2 of each pair
        change = (slope + diagonal)[enters][:, None] + (diagonal - slope)[leaves][None]
        change -= 2 * G[:, enters].T @ G[:, leaves]
        best = int(change.argmin())
        i, j = enters[best // len(leaves)], leaves[best % len(leaves)]
        if not float(change.reshape(-1)[best]) < -1e-12 * float(total.square().sum()):
            break
        out[i], out[j] = True, False
    return (~out).nonzero().reshape(-1)
