"""Rotations folded into the weights (QuaRot, arXiv 2404.00456; SpinQuant's R1 and R2, 2405.16406).

With an orthogonal R the function of a pre-norm transformer with RMSNorm does not change when the
residual stream h becomes h R, because a root mean square is invariant under R. Outliers of single
features are spread over all, at no cost at run time. With W (out, in), y = x W^T:

    embedding E            E R
    reads the residual     W diag(g) R     g: gain of the norm before it, which becomes ones
    writes the residual    R^T W, R^T b
    value, per head        P^T W, P^T b    P (head_dim, head_dim): a second rotation, whose inverse
    attention output       W P             goes into the columns of each head

LayerNorm subtracts a mean, which R changes: such a model cannot be rotated this way. A head tied to
the embedding becomes a parameter of its own, because only the head takes the last norm's gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Role:
    """Change of one parameter by rotation; without any field set it stays unchanged.

    reads, writes: the parameter reads or writes the residual stream
    gain: name of the norm's parameter to fold in, with reads
    heads_in, heads_out: inputs, or outputs, are attention heads side by side
    ones: the parameter is the gain of a norm that is folded away
    source: name of the tensor to start from, where it is another one (a tied head)
    """

    reads: bool = False
    writes: bool = False
    gain: str = ""
    heads_in: bool = False
    heads_out: bool = False
    ones: bool = False
    source: str = ""


def rotate_inputs(weight: Tensor, rotation: Tensor, gain: Tensor | None = None) -> Tensor:
    """Rotate the inputs of a weight (out, in) or embedding (vocabulary, in) before it is quantized:
    return W diag(gain) R; R is (in, in)."""
    folded = weight.double() if gain is None else weight.double() * gain.double()
    return (folded @ rotation).float()


def rotate_outputs(parameter: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the outputs of a parameter (out, in) or (out,) before it is quantized: return R^T W or
    R^T b; R, `rotation`, is (out, out)."""
    return (rotation.T @ parameter.double()).float()


def rotate_head_inputs(weight: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head's columns of a weight (out, heads * head_dim) before it is quantized: return
    W P."""
    out, size = len(weight), len(rotation)
    return (weight.double().reshape(out, -1, size) @ rotation).reshape(out, -1).float()


def rotate_head_outputs(parameter: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each head's rows of a parameter (heads * head_dim, in) or (heads * head_dim,) before
    it is quantized: return P^T W or P^T b.

    P is the same for all heads, so that query heads may share a value head.
    """
    heads = parameter.double().reshape(-1, len(rotation), parameter[0].numel())
    return (rotation.T @ heads).reshape(parameter.shape).float()


class Rotated(Mapping[str, Tensor]):
    """View of a checkpoint that rotates each tensor when it is read.

    roles: {parameter of the rotated model that changes: its role}
    residual: orthogonal (hidden, hidden) float64; None: the residual stream and its norms stay
    head: orthogonal (head_dim, head_dim) float64; None: values stay
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        roles: Mapping[str, Role],
        residual: Tensor | None,
        head: Tensor | None,
    ) -> None:
        self._tensors, self._roles = tensors, roles
        self._residual, self._head = residual, head
        added = [n for n, role in roles.items() if role.source] if residual is not None else []
        self._names = list(dict.fromkeys([*tensors, *added]))

    def __getitem__(self, name: str) -> Tensor:
        role = self._roles.get(name, Role())
        source = role.source if self._residual is not None else ""
        return self._rotate(self._tensors[source or name], role)

    def _rotate(self, t: Tensor, role: Role) -> Tensor:
        """Multiply the value `t` of a parameter by the rotation on the side that its role names."""
        if self._head is not None and role.heads_in:
            t = rotate_head_inputs(t, self._head)
        if self._head is not None and role.heads_out:
            t = rotate_head_outputs(t, self._head)
        if self._residual is None:
            return t
        if role.ones:
            return torch.ones_like(t)
        if role.reads:
            gain = self._tensors[role.gain] if role.gain else None
            t = rotate_inputs(t, self._residual, gain)
        return rotate_outputs(t, self._residual) if role.writes else t

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
