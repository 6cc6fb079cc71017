"""What each target accepts, as a table, and the check of a recipe against it.

The check runs before any weight is read. Rows are measured facts, not hopes: TensorRT-RTX 1.7
parses no zero point other than 0, no uint8 and no run-time activation ranges; ONNX Runtime 1.31
turns only power-of-two blocks from 16 to 256 into MatMulNBits.
"""

from __future__ import annotations

from dataclasses import dataclass

from optimizer.errors import RecipeError
from optimizer.recipe import Recipe


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


TARGETS: dict[str, Accepts] = {
    "onnxruntime": Accepts(
        lowering="ort_qdq",
        builds_engine=False,
        distribution="onnxruntime",
        weight_zero_point=True,
        dynamic_activations=True,
        group_sizes=(16, 32, 64, 128, 256),
        int4_granularities=("group",),
    ),
    "tensorrt-rtx": Accepts(
        lowering="trt_qdq",
        builds_engine=True,
        distribution="tensorrt-rtx",
        weight_zero_point=False,
        dynamic_activations=False,
        group_sizes=(16, 32, 64, 128, 256),
        int4_granularities=("group",),
    ),
}


def check(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing a target of this recipe cannot express."""
    for i, target in enumerate(recipe.targets):
        row = TARGETS[target.runtime]
        _check_weights(recipe, f"targets.{i}", target.runtime, row)
        _check_activations(recipe, f"targets.{i}", target.runtime, row)


def _others(attribute: str) -> str:
    return ", ".join(name for name, row in TARGETS.items() if getattr(row, attribute))


def _check_weights(recipe: Recipe, at: str, runtime: str, row: Accepts) -> None:
    weights = recipe.quantize.weights
    if not weights.symmetric and not row.weight_zero_point:
        raise RecipeError(
            f"false is not accepted by target {runtime} ({at}): it dequantizes with a scale only",
            where="quantize.weights.symmetric",
            fix=f"Use symmetric: true, or a target that takes zero points: "
            f"{_others('weight_zero_point')}.",
        )
    if weights.group_size is not None and weights.group_size not in row.group_sizes:
        raise RecipeError(
            f"{weights.group_size} is not accepted by target {runtime} ({at}): blocks of that "
            "size are not kept packed",
            where="quantize.weights.group_size",
            accepted=", ".join(map(str, row.group_sizes)),
        )
    if weights.bits == 4 and weights.granularity not in row.int4_granularities:
        raise RecipeError(
            f"{weights.granularity} with bits: 4 is accepted but not kept packed by target "
            f"{runtime} ({at}), so nothing would be gained",
            where="quantize.weights.granularity",
            accepted=", ".join(row.int4_granularities),
            fix="Use granularity: group with group_size: 32, 64 or 128.",
        )


def _check_activations(recipe: Recipe, at: str, runtime: str, row: Accepts) -> None:
    activations = recipe.quantize.activations
    if activations is None:
        return
    if activations.granularity == "token" and not row.dynamic_activations:
        raise RecipeError(
            f"token is not accepted by target {runtime} ({at}): it takes static ranges only",
            where="quantize.activations.granularity",
            fix=f"Use granularity: tensor, or only targets that measure at run time: "
            f"{_others('dynamic_activations')}.",
        )
    weights = recipe.quantize.weights
    if weights.bits != 8 or weights.granularity == "group" or not weights.symmetric:
        raise RecipeError(
            f"bits: {weights.bits}, granularity: {weights.granularity}, symmetric: "
            f"{str(weights.symmetric).lower()} with quantized activations has no integer kernel "
            f"on target {runtime} ({at})",
            where="quantize.weights",
            accepted="bits: 8, granularity: channel or tensor, symmetric: true",
            fix="Remove the activations block for weight-only compression.",
        )
