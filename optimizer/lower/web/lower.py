"""Lower for onnxruntime-web: ort_qdq, and the float graph where the recipe includes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from optimizer.harness import contract as contracts
from optimizer.lower.onnx import onnx_lowering
from optimizer.lower.onnx.onnx_lowering import Lowered
from optimizer.lower.ort import qdq
from optimizer.lower.ort.lower import ZEROS
from optimizer.lower.web import accepted
from optimizer.recipe.schema import OnnxRuntimeWebTarget

FLOAT = "float"
"""Folder of the float model, beside the lowered one."""


def lower(section: OnnxRuntimeWebTarget, source: Path, state: Path, graph: Path, out: Path) -> None:
    """Lower for onnxruntime-web: write model.onnx and lowering.json into `out`; arguments as in
    lower/stage.run.

    Raises CheckpointError for a tokenizer that the browser lacks, and for an embedding that the
    page cannot compute.
    """
    contract = contracts.read(source / "contract.json")
    accepted.check_tokenizer(source / "checkpoint" / contract.text.file)
    accepted.check_embedding(contract)
    model, names, compressed = onnx_lowering.read(graph, state)
    activations = qdq.lower(model, names, compressed)
    lowered = Lowered("ort_qdq", model, activations, zeros=ZEROS)
    onnx_lowering.write(lowered, names, compressed, section.float_type, out)
    if section.include_float:
        (out / FLOAT).mkdir()
        for path in sorted(graph.glob("model.onnx*")):
            shutil.copyfile(path, out / FLOAT / path.name)
