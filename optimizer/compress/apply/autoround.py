"""Learned rounding of a segment: what methods/autoround.py needs of the walk, and what
comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.methods.autoround import Learned, Samples, learn_rounding
from optimizer.compress.walk import blocks as walk
from optimizer.errors import CheckpointError
from optimizer.load.families import Family
from optimizer.qtensor import QTensor
from optimizer.recipe.quantize import Autoround


def learn(
    model: nn.Module,
    start: Mapping[str, QTensor],
    asked: Autoround,
    family: Family,
    stream: walk.Stream,
    segment: range,
    blocks: tuple[str, ...],
) -> Learned:
    """start: {module: codes}. The targets are stream.exact, which must have moved on already.

    gains come under their parameters' names. Raises CheckpointError when the loss is not finite.
    """
    assert stream.exact is not None

    def run(i: int, hidden: Tensor) -> Tensor:
        for use in segment:
            hidden = stream.uses[i][use].apply(model, hidden)
        return hidden

    try:
        return learn_rounding(
            run,
            {name: cast(nn.Linear, model.get_submodule(name)) for name in start},
            start,
            _gains(model, family, blocks),
            Samples(stream.hidden, stream.exact, stream.real),
            steps=asked.steps,
            seed=asked.seed,
            dtype=torch.bfloat16 if stream.float == "bf16" else torch.float32,
        )
    except ValueError as e:
        raise CheckpointError(
            str(e), where=blocks[0], fix="Use fewer steps, or methods: [gptq]."
        ) from e


def _gains(model: nn.Module, family: Family, blocks: tuple[str, ...]) -> dict[str, nn.Parameter]:
    """The gains of the norms in front of a block's linears."""
    norms = [p.producer for p in family.smooth if p.producer not in family.linears]
    found = {}
    for block in blocks:
        for norm in norms:
            weight = getattr(model.get_submodule(f"{block}.{norm}"), "weight", None)
            if isinstance(weight, nn.Parameter):
                found[f"{block}.{norm}.weight"] = weight
    return found
