"""Learned rounding of a segment: what methods/autoround.py needs of the walk, and what
comes of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from optimizer.compress.methods.autoround import AutoroundOptions, Block, Samples, learn_rounding
from optimizer.compress.methods.tuned import Tuned
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.errors import CheckpointError
from optimizer.products import TYPES
from optimizer.qtensor import QTensor
from optimizer.recipe.quantize import Quantize


def learn(group: BlockGroup, start: Mapping[str, QTensor], quantize: Quantize) -> tuple[Tuned, str]:
    """start: {module: integers}. The targets are the float reference, which must have moved on
    already.

    Norm weights come under their parameters' names. Raises CheckpointError when the loss is not
    finite.
    """
    stream, options = group.stream, quantize.autoround
    assert stream.float_reference is not None
    linears = {name: group.linear(name) for name in start}
    try:
        tuned = learn_rounding(
            Block(group.output, linears, _norm_weights(group)),
            start,
            Samples(stream.hidden, stream.float_reference, stream.real),
            AutoroundOptions(steps=options.steps, seed=options.seed, dtype=TYPES[stream.float]),
        )
    except ValueError as e:
        raise CheckpointError(
            str(e), where=group.blocks[0], fix="Use fewer steps, or methods: [gptq]."
        ) from e
    share = tuned.after / tuned.before if tuned.before else 1.0
    return tuned, f"learned: the block's error is {share:.3f} of what it was"


def _norm_weights(group: BlockGroup) -> dict[str, nn.Parameter]:
    """The weights of the norms in front of a block's linears."""
    family = group.family
    norms = [p.producer for p in family.smooth if p.producer not in family.linears]
    norm_weights = {}
    for block in group.blocks:
        for norm in norms:
            weight = getattr(group.model.get_submodule(f"{block}.{norm}"), "weight", None)
            if isinstance(weight, nn.Parameter):
                norm_weights[f"{block}.{norm}.weight"] = weight
    return norm_weights
