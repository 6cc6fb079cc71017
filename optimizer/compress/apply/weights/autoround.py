"""Apply AutoRound (methods/weights/autoround.py) to a segment.

Inputs that the state quantizes are fake-quantized during learning (straight_through.py). Norm
weights are learned only where inputs stay float, because a static range was chosen for their
outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from optimizer.compress.apply.weights.rounding import QuantizedInputs
from optimizer.compress.methods.weights import straight_through
from optimizer.compress.methods.weights.autoround import (
    Block,
    BlockSamples,
    learn_rounding,
)
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.compress.walk.products import TYPES
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.foundation.qtensor import QTensor
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.model.graph.module import GraphModel
from optimizer.recipe.compression.quantize import Quantize


def learn(
    group: BlockGroup, start: Mapping[str, QTensor], inputs: QuantizedInputs, quantize: Quantize
) -> tuple[Tuned, str]:
    """Learn a segment's rounding towards its float output, held by group.stream.float_reference.

    start: {module: quantized weight to begin from}

    Returns (weights by module and norm weights by parameter, remark). Raises CheckpointError when
    the loss is not finite.
    """
    stream = group.stream
    assert stream.float_reference is not None
    modules = {name: group.linear(name) for name in start}
    weights = {name: inputs.weight(name, module) for name, module in modules.items()}
    norm_weights = {} if inputs.mode else _norm_weights(group)
    padded = group.family.inputs not in (IMAGE.name, TENSORS.name)
    real = stream.real if padded else None
    samples = BlockSamples(stream.hidden, stream.float_reference, real, stream.device)
    try:
        with _quantized_inputs(group, inputs):
            tuned = learn_rounding(
                Block(group.output, modules, weights, norm_weights),
                start,
                samples,
                quantize.autoround,
                dtype=TYPES[stream.float],
            )
    except ValueError as e:
        raise CheckpointError(
            str(e), where=group.blocks[0], fix="Use fewer steps, or methods: [gptq]."
        ) from e
    left = [name for name in start if name not in tuned.weights]
    if left:
        say(
            f"compress: autoround leaves {', '.join(left[:3])}{' and others' * (len(left) > 3)} at "
            "the nearest integers: no gradient reaches them from the output of their block"
        )
    share = tuned.after / tuned.before if tuned.before else 1.0
    return tuned, f"learned: the block's error is {share:.3f} of what it was"


@contextmanager
def _quantized_inputs(group: BlockGroup, inputs: QuantizedInputs) -> Iterator[None]:
    """Inside, fake-quantize the inputs of modules and of identities before residual adds."""
    quantized = [*group.schemes, *group.summands] if inputs.mode else []
    handles = [
        group.model.get_submodule(name).register_forward_pre_hook(_quantizer(inputs, name))
        for name in quantized
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _quantizer(
    inputs: QuantizedInputs, name: str
) -> Callable[[nn.Module, tuple[Tensor, ...]], Tensor]:
    """Return a function that fake-quantizes the input of module `name` with gradients, while
    AutoRound learns the rounding of a block."""
    factor = inputs.factors.get(name)
    covered = None if inputs.mode == "token" else inputs.ranges[name]

    def quantized(_module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        with torch.autocast(args[0].device.type, enabled=False):
            x = args[0].float() if factor is None else args[0].float() * factor
            if covered is None:
                return straight_through.fake_quantize_tokens(x)
            unmoved = straight_through.start_logarithms(covered).to(x.device)
            return straight_through.fake_quantize_activation(x, covered, unmoved)

    return quantized


def _norm_weights(group: BlockGroup) -> dict[str, nn.Parameter]:
    """Return {parameter: weight} of the norms before the blocks' linears."""
    family = group.family
    if isinstance(group.model, GraphModel):
        return {}  # a gradient may not reach a norm of another part's output
    norms = [p.producer for p in family.smooth if p.producer not in family.linears]
    norm_weights = {}
    for block in group.blocks:
        for norm in norms:
            weight = getattr(group.model.get_submodule(f"{block}.{norm}"), "weight", None)
            if isinstance(weight, nn.Parameter):
                norm_weights[f"{block}.{norm}.weight"] = weight
    return norm_weights
