"""Lower the float graph and the compressed state to one target's format.

Each target writes its own files (targets/__init__.py: lower) and lowering.json, with the result for
each module and optional `notes`: [sentence, ...] for readers of the model. A target that takes ONNX
writes model.onnx (and model.onnx.data above 2 GiB), and in lowering.json:
    dialect   "ort_qdq" | "trt_qdq"
    exact     true where the file's weights are the state's, bit for bit, in the file's float type
              (fp16 rounds integer * scale to its 11 bits)
    modules   {module: {weight: "int8 channel", activation: "uint8" ("ids" of an embedding),
              codes: initializer of its integers}}  # prose: ok (key of the file)
    float     [module, ...] unchanged linear modules
    summands  [module, ...] identities before residual adds, where these are quantized
    sparsity  {module: pattern}, where weights are pruned
    attention null | {fused: [module, ...], left: {layer: why}}: a decoder's attentions fused to an
              operator of ONNX Runtime or OpenVINO; for OpenVINO also `unpaged`: the reason why its
              KV cache cannot be paged, or ""
Every weight is then read back from the file and compared with the state.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

from optimizer import targets
from optimizer.export import onnx_file
from optimizer.foundation.references import resolve
from optimizer.model.graph.needs import libraries_of
from optimizer.recipe.schema import TargetSection
from optimizer.store import Estimate, Shapes, Stage, lowered_bytes


def run(section: TargetSection, source: Path, state: Path, graph: Path, *, out: Path) -> None:
    """Lower the exported graph and the state to the dialect of the section's target.

    source: folder of the compressed checkpoint and its contract
    state, graph: folders of the compress and export stages
    Raises OptimizeError for a weight of the state that the graph lacks, LedgerError where the
    written file reads back with other weights.
    """
    resolve(targets.look_up(section.runtime).lower)(section, source, state, graph, out)


def files(section: TargetSection) -> Mapping[str, str]:
    """Return {name: digest} of the target's lowering code, which is imported only by `run`."""
    return targets.look_up(section.runtime).code("lower")


def estimate(section: TargetSection, shapes: Shapes) -> Estimate:
    """Estimate for stage lower memory from one weight at a time, or copies of a file that is
    written at once, and disk from what compress makes integers."""
    target = targets.look_up(section.runtime)
    if target.estimate:
        own: Estimate = resolve(target.estimate)(section, shapes)
        return own
    file = lowered_bytes(shapes, 4 if section.float_type == "fp32" else 2)
    largest = max(map(prod, shapes.values()), default=0)
    return Estimate(
        memory=libraries_of(shapes, 440 << 20)
        + (3 * file if file < onnx_file.LIMIT else 9 * largest // 4),
        disk=file,
        seconds=0.5 + sum(map(prod, shapes.values())) / 50e6,
    )


STAGE = Stage("lower", 2, run, packages=("onnx", "onnx-ir"), files=files, estimate=estimate)
