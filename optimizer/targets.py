"""What each target accepts, as a table, and the check of a recipe against it.

The check runs before any weight is read. Rows are measured facts, not hopes: TensorRT-RTX 1.7
parses no zero point other than 0, no uint8 and no run-time activation ranges, and builds no Gather
of int8 constants, which are "only allowed before DQ"; ONNX Runtime 1.31 turns only power-of-two
blocks from 16 to 256 into MatMulNBits. TensorRT's row is RTX's, whose parser it shares; it is not
measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from optimizer.errors import RecipeError
from optimizer.harness import tasks
from optimizer.harness.errors import BuildError
from optimizer.harness.runtimes.trt.products import Options, refuse_options
from optimizer.recipe.schema import Recipe, Target, TensorRTTarget, Weights


@dataclass(frozen=True)
class Accepts:
    """One row: a runtime, the lowering that writes its format, and what that can express."""

    lowering: str  # a module in optimizer/lower/
    builds_engine: bool  # a file that fits only some machines
    distribution: str  # what to pip install
    weight_zero_point: bool  # asymmetric weights
    dynamic_activations: bool  # granularity: token
    group_sizes: tuple[int, ...]
    int4_granularities: tuple[str, ...]
    codes_looked_up: bool  # takes rows of an int8 table, so that an embedding stays in codes


RTX = Accepts(
    lowering="trt_qdq",
    builds_engine=True,
    distribution="tensorrt-rtx",
    weight_zero_point=False,
    dynamic_activations=False,
    group_sizes=(16, 32, 64, 128, 256),
    int4_granularities=("group",),
    codes_looked_up=False,
)

TARGETS: dict[str, Accepts] = {
    "onnxruntime": Accepts(
        lowering="ort_qdq",
        builds_engine=False,
        distribution="onnxruntime",
        weight_zero_point=True,
        dynamic_activations=True,
        group_sizes=(16, 32, 64, 128, 256),
        int4_granularities=("group",),
        codes_looked_up=True,
    ),
    "tensorrt-rtx": RTX,
    "tensorrt": replace(RTX, distribution="tensorrt"),
}


def check(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing a target of this recipe cannot express."""
    for i, target in enumerate(recipe.targets):
        row = TARGETS[target.runtime]
        _check_weights(recipe, f"targets.{i}", target.runtime, row)
        _check_activations(recipe, f"targets.{i}", target, row)
        if isinstance(target, TensorRTTarget):
            _check_options(target, f"targets.{i}")
            _check_calibrated_length(recipe, target, f"targets.{i}")


def options(target: TensorRTTarget) -> Options:
    """What the builder is told, beside the shapes."""
    return Options.from_json(target.model_dump())


def _check_options(target: TensorRTTarget, at: str) -> None:
    """An option its product does not have would be dropped in silence by the builder."""
    try:
        refuse_options(target.runtime, options(target))
    except BuildError as e:
        raise RecipeError(
            e.found, where=f"{at}.{e.where}", accepted=e.accepted, fix=e.fix
        ) from None


def _check_calibrated_length(recipe: Recipe, target: TensorRTTarget, at: str) -> None:
    """Ranges measured on texts that no profile takes are ranges of something else."""
    if recipe.calibrate is None:
        return
    length, generates = recipe.calibrate.sequence_length, tasks.task(recipe.model.task).generates
    spans = [
        (p.sequence[0], p.sequence[2] + (p.past[2] if generates else 0))
        for p in target.shapes.profiles()
    ]
    if not any(low <= length <= high for low, high in spans):
        raise RecipeError(
            f"no profile takes a sequence of {length}, which calibrate.sequence_length has",
            where=f"{at}.shapes.sequence",
            accepted=" or ".join(f"{low} to {high}" for low, high in spans),
            fix="Widen the profile, or calibrate at a length that will be run.",
        )


def _others(attribute: str) -> str:
    return ", ".join(name for name, row in TARGETS.items() if getattr(row, attribute))


def _weights(recipe: Recipe) -> list[tuple[str, Weights]]:
    """Every weights block of the recipe, and where it stands."""
    quantize = recipe.quantize
    found = [("quantize.weights", quantize.weights)]
    found += [(f"quantize.layers.{i}.weights", r.weights) for i, r in enumerate(quantize.layers)]
    choices = quantize.allocate.choices if quantize.allocate else ()
    found += [(f"quantize.allocate.choices.{i}", w) for i, w in enumerate(choices)]
    named = (("head", quantize.head), ("embedding", quantize.embedding))
    return found + [(f"quantize.{n}", w) for n, w in named if not isinstance(w, str)]


def _check_weights(recipe: Recipe, at: str, runtime: str, row: Accepts) -> None:
    embedding = recipe.quantize.embedding
    if embedding != "float" and not row.codes_looked_up:
        raise RecipeError(
            f"a quantized embedding is not accepted by target {runtime} ({at}): it takes int8 "
            "constants only where they are de-quantized whole, not to look rows up",
            where="quantize.embedding",
            accepted="float",
            fix=f"Remove it, or use only targets that look up codes: {_others('codes_looked_up')}.",
        )
    if embedding != "float" and embedding.bits < 8:
        raise RecipeError(
            f"{embedding.bits} is not accepted by target {runtime} ({at}): rows of a table are "
            "looked up in whole bytes, so that nothing would be gained over 8",
            where="quantize.embedding.bits",
            accepted="8",
        )
    for where, weights in _weights(recipe):
        _check_one(weights, where, at, runtime, row)


def _check_one(weights: Weights, where: str, at: str, runtime: str, row: Accepts) -> None:
    if not weights.symmetric and not row.weight_zero_point:
        raise RecipeError(
            f"false is not accepted by target {runtime} ({at}): it dequantizes with a scale only",
            where=f"{where}.symmetric",
            fix=f"Use symmetric: true, or a target that takes zero points: "
            f"{_others('weight_zero_point')}.",
        )
    if weights.group_size is not None and weights.group_size not in row.group_sizes:
        raise RecipeError(
            f"{weights.group_size} is not accepted by target {runtime} ({at}): blocks of that "
            "size are not kept packed",
            where=f"{where}.group_size",
            accepted=", ".join(map(str, row.group_sizes)),
        )
    if weights.bits < 8 and weights.granularity not in row.int4_granularities:
        raise RecipeError(
            f"{weights.granularity} with bits: {weights.bits} is accepted but not kept packed by "
            f"target {runtime} ({at}), so nothing would be gained",
            where=f"{where}.granularity",
            accepted=", ".join(row.int4_granularities),
            fix="Use granularity: group with group_size: 32, 64 or 128.",
        )


def _check_activations(recipe: Recipe, at: str, target: Target, row: Accepts) -> None:
    activations, runtime = recipe.quantize.activations, target.runtime
    if activations is None:
        return
    if runtime == "onnxruntime" and target.device == "cuda":
        raise RecipeError(
            f"quantized activations have no integer kernels there ({at}): ONNX Runtime fuses codes "
            "of activations into products on the CPU only (DynamicQuantizeMatMul and "
            "MatMulIntegerToFloat are not among the CUDA provider's operators)",
            where="quantize.activations",
            fix="Use target tensorrt or tensorrt-rtx, or device: cpu, or remove the block for "
            "weight-only compression.",
        )
    if activations.granularity == "token" and not row.dynamic_activations:
        raise RecipeError(
            f"token is not accepted by target {runtime} ({at}): it takes static ranges only",
            where="quantize.activations.granularity",
            fix=f"Use granularity: tensor, or only targets that measure at run time: "
            f"{_others('dynamic_activations')}.",
        )
    for where, weights in _weights(recipe):
        if where in ("quantize.head", "quantize.embedding"):
            continue  # weight-only: outside the blocks no input is coded
        if weights.bits == 8 and weights.granularity != "group" and weights.symmetric:
            continue
        raise RecipeError(
            f"bits: {weights.bits}, granularity: {weights.granularity}, symmetric: "
            f"{str(weights.symmetric).lower()} with quantized activations has no integer kernel "
            f"on target {runtime} ({at})",
            where=where,
            accepted="bits: 8, granularity: channel or tensor, symmetric: true",
            fix="Remove the activations block for weight-only compression.",
        )
