"""Apply scale tuning (methods/weights/scale_tuning.py) to a compressed decoder."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from optimizer.compress.data.calibration import Windows, split_batches
from optimizer.compress.methods.precision.language_model import LanguageModel
from optimizer.compress.methods.weights.scale_tuning import TuningSettings, tune_scales
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.compress.walk.model_source import ModelSource
from optimizer.compress.walk.products import TYPES
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.progress import say
from optimizer.foundation.state import CompressedState
from optimizer.recipe.schema import Compression


def tune(
    source: ModelSource, state: CompressedState, windows: Windows, section: Compression
) -> tuple[Tuned, str]:
    """Tune the scales and norm weights of `state` end to end.

    state: compressed blocks, chosen without windows.held_out

    Returns (Tuned by parameter, remark). Raises CheckpointError when a loss is not finite.
    """
    options = section.quantize.scale_tuning
    say("compress: tuning scales and norm weights end to end; the whole model is in memory for it")
    try:
        with source.filled(state.replaced):
            tuned = tune_scales(
                LanguageModel(
                    source.features,
                    source.head,
                    source.linears(state.weights),
                    _norm_weights(source),
                ),
                {name: q.to(source.device) for name, q in state.weights.items()},
                split_batches(windows.train),
                windows.held_out,
                options,
                TuningSettings(dtype=TYPES[section.compress.decided]),
            )
    except ValueError as e:
        raise CheckpointError(
            str(e), where="quantize.scale_tuning", fix="Leave scale_tuning out of quantize.methods."
        ) from e
    say(f"compress: KL on held-out calibration text {tuned.before:.4f} -> {tuned.after:.4f}")
    weights = {name: q.to(CPU) for name, q in tuned.weights.items()}
    norm_weights = {name: gain.cpu() for name, gain in tuned.norm_weights.items()}
    tuned = replace(tuned, weights=weights, norm_weights=norm_weights)
    return tuned, "scales tuned end to end"


def _norm_weights(source: ModelSource) -> dict[str, nn.Parameter]:
    """Return {parameter: weight} of the norms before linears in every block, and of the final
    norm."""
    family = source.family
    norms = {p.producer for p in family.smooth if p.producer not in family.linears}
    norm_weights = {}
    for name, module in source.model.named_modules():
        if name == source.final_norm or any(name.endswith(f".{norm}") for norm in norms):
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter):
                norm_weights[f"{name}.weight"] = weight
    return norm_weights
