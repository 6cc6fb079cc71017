"""lower: the float graph and the compressed state become one target's own format.

What it writes is the target's (targets/__init__.py: lower), and lowering.json, which says what
became of each module, and where there are any, `notes`: [sentence, ...] for who reads the model. Of
a target that takes ONNX, model.onnx (and model.onnx.data above 2 GiB) and there:
    dialect   "ort_qdq" | "trt_qdq"
    exact     whether the file's weights are the state's, bit for bit, in the float type the
              file computes in (fp16 rounds code * scale to its 11 bits)
    modules   {module: {weight: "int8 channel", activation: "uint8", codes: initializer}}; the
              activation of an embedding is "ids"
    float     [module, ...] linear modules left as they were
    summands  [module, ...] identities in front of residual adds, where these are quantized
    sparsity  {module: pattern}, where weights are pruned
    attention null | {fused: [module, ...], left: {layer: why}}: a decoder's attentions, as an
              operator of ONNX Runtime's or OpenVINO's; of OpenVINO also `unpaged`: why its cache
              cannot be paged, or ""
Before it is done every weight is read back from the file and compared with the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from optimizer import targets
from optimizer.foundation.references import resolve
from optimizer.recipe.schema import TargetSection
from optimizer.store import Estimate, Shapes, Stage


def run(section: TargetSection, source: Path, state: Path, graph: Path, *, out: Path) -> None:
    """graph: the export stage's folder; state: the compress stage's; source: that of the checkpoint
    which was compressed, which also has the contract.

    Raises OptimizeError when the state holds a weight the graph does not, LedgerError when the
    written file does not give the state's weights back.
    """
    resolve(targets.of(section.runtime).lower)(section, source, state, graph, out)


def files(section: TargetSection) -> Mapping[str, str]:
    """The code of the target's lowering, which is imported only where it is called."""
    return targets.of(section.runtime).code("lower")


def estimate(section: TargetSection, shapes: Shapes) -> Estimate:
    """Disk is an upper bound: as if every weight stayed float."""
    target = targets.of(section.runtime)
    if target.estimate:
        own: Estimate = resolve(target.estimate)(section, shapes)
        return own
    elements = sum(map(prod, shapes.values()))
    width = 4 if section.float_type == "fp32" else 2
    largest = max(map(prod, shapes.values()), default=0)
    return Estimate(
        memory=(400 << 20) + 2 * width * elements + 8 * largest,
        disk=width * elements,
        seconds=0.5 + elements / 50e6,
    )


STAGE = Stage("lower", 2, run, packages=("onnx", "onnx-ir"), files=files, estimate=estimate)
