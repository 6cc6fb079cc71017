"""Models to compare: INT8 files of the pipeline, and the float graph of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimizer.recipe.schema import Compression, OpenVinoTarget, Recipe, TargetSection
from optimizer.store import Step, Store


@dataclass(frozen=True)
class Lowered:
    """INT8 files of one compressed state.

    attention: file for OpenVINO of a state whose attention multiplies integers as well
    """

    onnxruntime: Path
    openvino: Path
    attention: Path


def lower_model(recipe: Recipe, store: Store, model: Path | None) -> tuple[Step, Lowered]:
    """Run the pipeline's stages up to lower; return the load step and the INT8 files.

    model: file or bundle that replaces the one for ONNX Runtime
    """
    from optimizer.compress.stage import STAGE as compress
    from optimizer.export.stage import STAGE as export
    from optimizer.load.stage import STAGE as load
    from optimizer.lower.stage import STAGE as lower

    source = store.step(load, recipe.model)
    target = next(t for t in recipe.targets if t.runtime == "onnxruntime")
    openvino = OpenVinoTarget(runtime="openvino")

    def made(section: Compression, *targets: TargetSection) -> list[Path]:
        state = store.step(compress, section, source)
        graph = store.step(export, target.export, source, state)
        steps = [store.step(lower, t, source, state, graph) for t in targets]
        return [step.path / "model.onnx" for step in steps]

    ours, other = made(recipe.compression, target, openvino)
    (attention,) = made(with_attention(recipe.compression), openvino)
    if model is not None:
        ours = sorted(model.rglob("model.onnx"))[0] if model.is_dir() else model
    return source, Lowered(ours, other, attention)


def with_attention(section: Compression) -> Compression:
    """Add integer products in attention to a compression."""
    assert section.quantize.activations is not None
    activations = section.quantize.activations.model_copy(update={"attention": "int8"})
    quantize = section.quantize.model_copy(update={"activations": activations})
    return section.model_copy(update={"quantize": quantize})


def export_float(source: Path, folder: Path) -> Path:
    """Export the float ONNX graph of the untouched checkpoint.

    The pipeline's graph is not a fair start for a peer: compression has folded scales into its
    float weights.
    """
    from optimizer.export.stage import run as export
    from optimizer.foundation import state
    from optimizer.recipe.schema import Export

    nothing = folder / "nothing"
    nothing.mkdir()
    state.write(state.CompressedState(weights={}), nothing)
    export(Export(), source, nothing, out=folder)
    return folder / "model.onnx"
