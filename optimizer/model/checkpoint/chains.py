"""Modules of parts one after another, with identities where a runtime adds or pools integers.

What a residual add or pooling reads can be quantized where a module hands it on. Classes that have
none there are rebuilt in a skeleton, around the same parts of the same names:

    residual(parts(x)) + shortcut(x)      where what was read is added
    result(parts(x))                      elsewhere
"""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from optimizer.model.architectures.residual_blocks import Chain


class Rebuilt(nn.Module):
    """The parts of `like`, a module of a Chain's class."""

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
    """Every module of these classes in `model`, a skeleton. Those that hold others come
    first: one of their parts may say whether they add."""
    kinds = {chain.kind: chain for chain in chains}
    for path, module in list(model.named_modules()):
        chain = kinds.get(type(module).__name__)
        if chain is not None:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Rebuilt(module, chain))
