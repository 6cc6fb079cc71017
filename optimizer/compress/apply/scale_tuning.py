"""Tune a compressed decoder end to end: what methods/scale_tuning.py needs of the whole model,
and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimizer.compress.data.calibration import singly
from optimizer.compress.methods.scale_tuning import Batch, Distilled, distill
from optimizer.errors import CheckpointError
from optimizer.load.families import Family
from optimizer.load.model import materialize, release
from optimizer.qtensor import QTensor
from optimizer.recipe.quantize import ScaleTuning


def tune(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    replaced: Mapping[str, Tensor],
    start: Mapping[str, QTensor],
    facts: Family,
    prefix: str,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    asked: ScaleTuning,
    dtype: torch.dtype,
) -> Distilled:
    """model: a skeleton, left as one; replaced: float values that stand in for the checkpoint's;
    start: {parameter: codes} of the blocks' linears, chosen without sight of held_out.

    The results are under the parameters' names. Raises CheckpointError when a loss is not finite.
    """
    materialize(model, "", tensors, replaced)
    base: Any = model.get_submodule(prefix.removesuffix("."))

    def features(batch: Batch) -> Tensor:
        return cast(Tensor, base(**batch, use_cache=False).last_hidden_state)

    linears = {n: cast(nn.Linear, model.get_submodule(n.removesuffix(".weight"))) for n in start}
    try:
        return distill(
            features,
            cast(Tensor, model.get_submodule(facts.head).weight),
            linears,
            start,
            _gains(model, facts, prefix),
            singly(batches),
            held_out,
            epochs=asked.epochs,
            together=asked.batch_size,
            seed=asked.seed,
            dtype=dtype,
        )
    except ValueError as e:
        raise CheckpointError(
            str(e), where="quantize.scale_tuning", fix="Leave scale_tuning out of quantize.methods."
        ) from e
    finally:
        release(model)


def _gains(model: nn.Module, facts: Family, prefix: str) -> dict[str, nn.Parameter]:
    """The gains of all norms: those in front of linears, and the last one."""
    norms = {p.producer for p in facts.smooth if p.producer not in facts.linears}
    last = f"{prefix}{facts.final_norm}"
    found = {}
    for name, module in model.named_modules():
        if name == last or any(name.endswith(f".{norm}") for norm in norms):
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):
                found[f"{name}.weight"] = weight
    return found
