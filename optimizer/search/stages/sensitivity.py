"""Stage `sensitivity`: how far each module alone, quantized as the recipe says, moves the output of
the model, measured as quantize.keep_float_auto does.

out/sensitivity.json   {module: {"error": relative L2, "weights": number}} in the model's order
"""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.compress.apply.precision.keep_float_auto import Network, spread
from optimizer.compress.data import calibration
from optimizer.compress.data.calibration import singly
from optimizer.compress.selection import select
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.compress.walk.model_source import open_source
from optimizer.recipe.compression import methods
from optimizer.recipe.compression.quantize import KeepFloatAuto
from optimizer.recipe.schema import Compression
from optimizer.store import Stage

FILE = "sensitivity.json"
SAMPLES = int(KeepFloatAuto.model_fields["samples"].default)


def section_of(compression: Compression) -> Compression:
    """Section of this stage: the recipe's formats, without methods, which the measurement does not
    use, and with float attention."""
    quantize = compression.quantize
    activations = quantize.activations
    if activations is not None:
        activations = activations.model_copy(update={"attention": "float"})
    plain = {
        "method": methods.NEAREST.name,
        "methods": (),
        "keep_float_auto": None,
        "allocate": None,
        "bias_correction": False,
        "activations": activations,
    }
    return compression.model_copy(update={"quantize": quantize.model_copy(update=plain)})


def run(section: Compression, base: Path, out: Path) -> None:
    """Measure every module that the recipe quantizes. base: folder of load"""
    source = open_source(section.task, base)
    selection = select(source, section.quantize)
    inputs = spread(singly(calibration.batches(section, base)), SAMPLES)
    with source.filled():
        network = Network(source, inputs, section.quantize, selection)
        errors = network.errors_alone()
        linears = source.linears(selection.quantized)
        document = {
            name: {"error": error, "weights": linears[name].weight.numel()}
            for name, error in errors.items()
        }
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


STAGE = Stage("sensitivity", 1, run, packages=COMPRESS.packages, files=COMPRESS.files)
