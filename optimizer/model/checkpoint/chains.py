"""Rebuild chains of modules with identities at the places where a runtime adds or pools integers.

The input of a residual add or of pooling can be quantized only at a module. Classes without one
there are rebuilt in a skeleton, with the same parts under the same names:

    residual(parts(x)) + shortcut(x)      if the input is added
    result(parts(x))                      otherwise
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from optimizer.model.architectures.residual_blocks import Chain


class ChainWithIdentities(nn.Module):
    """Module of a torch model with the parts of `like`, a module of the chain's class, and
    identities between them."""

    def __init__(self, like: nn.Module, chain: Chain) -> None:
        super().__init__()
        parts = {name: getattr(like, name, None) for name in chain.parts}
        self.order = tuple(name for name, part in parts.items() if part is not None)
        for name in self.order:
            setattr(self, name, parts[name])
        adds = bool(chain.adds and attrgetter(chain.adds)(like))
        self.residual = nn.Identity() if adds else None
        self.shortcut = nn.Identity() if adds else None
        self.result = None if adds else nn.Identity()
        self.train(like.training)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Apply the parts to the last of `inputs`, and the identities to the result or to both
        operands of the residual add."""
        hidden = read = inputs[-1]
        for name in self.order:
            part: Any = getattr(self, name)
            hidden = part(hidden)
        if self.result is not None:
            return self.result(hidden)  # type: ignore[no-any-return]
        assert self.residual is not None
        assert self.shortcut is not None
        return self.residual(hidden) + self.shortcut(read)  # type: ignore[no-any-return]


def rebuild(model: nn.Module, chains: Collection[Chain]) -> None:
    """Replace every module of these classes in `model`, a skeleton, by a ChainWithIdentities. Outer
    modules are replaced first, because an attribute of a part may tell whether the outer one adds
    its input."""
    kinds = {chain.kind: chain for chain in chains}
    for path, module in list(model.named_modules()):
        chain = kinds.get(type(module).__name__)
        if chain is not None:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, ChainWithIdentities(module, chain))
