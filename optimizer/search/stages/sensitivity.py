"""Stage `sensitivity`: how far each module alone, quantized as the recipe says, moves the output of
the model, measured as quantize.keep_float_auto does. A decoder of which weights alone are quantized
would take a run of the whole model for each of its modules; there it is the nats per token that the
finer form saves, predicted as for quantize.allocate.

out/sensitivity.json   {module: {"error", "weights": number}} in the model's order; error: relative
                       L2, or the square root of the nats
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optimizer.compress.apply.precision import mixed_precision
from optimizer.compress.apply.precision.keep_float_auto import Network, sample_evenly
from optimizer.compress.data import calibration
from optimizer.compress.data.calibration import split_batches
from optimizer.compress.selection import Selection, select
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.walk import precision
from optimizer.compress.walk.capture import Batch
from optimizer.compress.walk.model_source import ModelSource, open_source
from optimizer.harness import tasks
from optimizer.recipe.compression import methods
from optimizer.recipe.compression.quantize import Allocate, KeepFloatAuto
from optimizer.recipe.schema import Compression
from optimizer.search.candidates import finer_weights
from optimizer.store import Stage

FILE = "sensitivity.json"
SAMPLES = int(KeepFloatAuto.model_fields["samples"].default)


def make_section(compression: Compression) -> Compression:
    """Make the section by which a search measures modules: the recipe's formats, without methods,
    which the measurement does not use, and with float attention; for a decoder of which weights
    alone are quantized, `allocate` with the finer form."""
    quantize = compression.quantize
    activations = quantize.activations
    if activations is not None:
        activations = activations.model_copy(update={"attention": "float"})
    finer = finer_weights(quantize) if tasks.find_task(compression.task).generates else None
    plain = {
        "method": methods.NEAREST.name,
        "methods": (),
        "keep_float_auto": None,
        "allocate": Allocate(choices=(finer,)) if finer else None,
        "bias_correction": False,
        "activations": activations,
    }
    return compression.model_copy(update={"quantize": quantize.model_copy(update=plain)})


def run(section: Compression, base: Path, out: Path) -> None:
    """Measure for a search the sensitivity of every module that the recipe quantizes. base: folder
    of load"""
    source = open_source(section.task, base)
    selection = select(source, section.quantize)
    batches = calibration.make_batches(section, base)
    if section.quantize.allocate is not None:
        document = _predicted(source, batches, section, selection, out)
    else:
        document = _measured(source, batches, section, selection)
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def predict_seconds(section: Compression, base: Path) -> float:
    """Predict the seconds that measuring all modules takes, from those of the first module.

    base: folder of load

    Returns 0 for a decoder, whose modules all take one backward pass.
    """
    if section.quantize.allocate is not None:
        return 0.0
    source = open_source(section.task, base)
    selection = select(source, section.quantize)
    batches = calibration.make_batches(section, base)
    with source.filled():
        network = open_network(source, batches, section, selection)
        first, *others = selection.quantized
        started = time.monotonic()
        network.error([first])
        return (1 + len(others)) * (time.monotonic() - started)


def open_network(
    source: ModelSource, batches: Sequence[Batch], section: Compression, selection: Selection
) -> Network:
    inputs = sample_evenly(split_batches(batches), SAMPLES)
    return Network(source, inputs, section.quantize, selection)


def _measured(
    source: ModelSource, batches: Sequence[Batch], section: Compression, selection: Selection
) -> dict[str, Any]:
    with source.filled():
        errors = open_network(source, batches, section, selection).errors_alone()
        linears = source.linears(selection.quantized)
        return {
            name: {"error": error, "weights": linears[name].weight.numel()}
            for name, error in errors.items()
        }


def _predicted(
    source: ModelSource,
    batches: Sequence[Batch],
    section: Compression,
    selection: Selection,
    scratch: Path,
) -> dict[str, Any]:
    """Predict for a search, for each module of a decoder, the nats per token that it costs in the
    recipe's weight format beyond the finer one of the search.

    Returns {module: {"error": square root of these nats, "weights": number of weights}}. A root,
    as in other models `error` is a distance, whose square is proportional to the nats.
    """
    walked = precision.decide(section.compress, source, scratch, STAGE.name)
    section = section.model_copy(update={"compress": walked})
    predicted = mixed_precision.measure(source, batches, section, selection, scratch)
    document = {}
    for name, costs in predicted.costs.items():
        own, finer = costs[selection.quantized[name]], min(costs.values())
        weights = math.prod(predicted.shapes[name])
        document[name] = {"error": math.sqrt(max(own - finer, 0.0)), "weights": weights}
    return document


STAGE = Stage("sensitivity", 1, run, packages=COMPRESS.packages, files=COMPRESS.files)
