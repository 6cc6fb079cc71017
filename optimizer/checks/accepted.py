"""Check a recipe against what its targets accept, before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from optimizer import targets
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError, collect
from optimizer.foundation.references import resolve
from optimizer.harness import tasks
from optimizer.recipe.compression.quantize import Weights
from optimizer.recipe.schema import Recipe, TargetSection
from optimizer.targets import Accepts, Target


def check(recipe: Recipe, _: Context) -> None:
    """Check before a run: raise RecipeError for everything in the recipe that one of its targets
    cannot express."""
    calls: list[Callable[[], None]] = []
    for i, section in enumerate(recipe.targets):
        target, at = targets.look_up(section.runtime), f"targets.{i}"
        calls += [
            partial(_check_weights, recipe, at, target),
            partial(_check_activations, recipe, at, section, target),
            partial(_check_zeros, recipe, at, target),
            partial(_check_cache, recipe, at, target),
            partial(_check_float, recipe, section, at),
        ]
        if target.check:
            calls.append(partial(resolve(target.check), recipe, section, at))
        calls.append(partial(_check_calibrated_length, recipe, section, at))
    collect(calls)


def _check_calibrated_length(recipe: Recipe, section: TargetSection, at: str) -> None:
    """Check before a run that an optimization profile of the engine accepts texts as long as the
    calibration texts."""
    if recipe.calibrate is None or not section.profiles:
        return
    length, generates = (
        recipe.calibrate.sequence_length,
        tasks.find_task(recipe.model.task).generates,
    )
    spans = [
        (p.sequence[0], p.sequence[2] + (p.past[2] if generates else 0)) for p in section.profiles
    ]
    if not any(low <= length <= high for low, high in spans):
        raise RecipeError(
            f"no profile accepts {length} tokens, the length of calibrate.sequence_length",
            where=f"{at}.shapes.sequence",
            accepted=" or ".join(f"{low} to {high}" for low, high in spans),
            fix="Widen the profile, or calibrate at a length that it accepts.",
        )


def _others(does: Callable[[Accepts], bool], device: str = "") -> str:
    """Return "NAME, NAME", the targets that accept a feature that the checked recipe asks for.

    does: predicate on the capabilities of a target
    device: device that the targets must run on; "": any
    """
    return ", ".join(
        target.name
        for target in targets.load_all()
        if does(target.accepts) and (not device or device in target.section.devices())
    )


def _check_zeros(recipe: Recipe, at: str, target: Target) -> None:
    """Check before a run that a target accepts pruned weights that stay float, and has kernels that
    gain speed from them."""
    sparsity, row = recipe.sparsity, target.accepts
    if sparsity is None or not recipe.quantize.leaves_float:
        return
    if not row.zeros_alone:
        raise RecipeError(
            f"sparsity without quantization is not accepted by target {target.name} ({at}): its "
            "format cannot store sparse float weights",
            where="sparsity",
            fix="Add a quantize section, e.g. quantize: {methods: [gptq], ...}, or remove "
            f"{target.name}.",
        )
    timed = recipe.validate_.latency.must_beat_float and not target.untimed
    if timed and str(sparsity.shape) not in row.sparse_kernels:
        raise RecipeError(
            f"true, but sparsity without quantization is not faster on target {target.name} "
            f"({at}), which has no kernels for {sparsity.shape} weights",
            where="validate.latency.must_beat_float",
            fix="Set must_beat_float: false if only zeros are wanted, add a quantize section, "
            f"or use a target with sparse kernels: {_others(lambda a: bool(a.sparse_kernels))} "
            "(2:4).",
        )


def _check_weights(recipe: Recipe, at: str, target: Target) -> None:
    embedding, runtime, row = recipe.quantize.embedding, target.name, target.accepts
    if embedding != "float" and not row.integer_lookup:
        raise RecipeError(
            f"a quantized embedding is not accepted by target {runtime} ({at}): it cannot look up "
            "rows in an int8 table",
            where="quantize.embedding",
            accepted="float",
            fix=f"Remove it, or use only targets that can: {_others(lambda a: a.integer_lookup)}.",
        )
    if embedding != "float" and embedding.bits < 8:
        raise RecipeError(
            f"{embedding.bits} is not accepted by target {runtime} ({at}): rows are looked up in "
            "bytes, so fewer bits would save nothing",
            where="quantize.embedding.bits",
            accepted="8",
        )
    for where, weights in targets.list_weight_blocks(recipe):
        _check_one(weights, where, at, runtime, row)


def _check_cache(recipe: Recipe, at: str, target: Target) -> None:
    """Check before a run that the target can store the KV cache in the type that quantize.kv_cache
    asks for."""
    if recipe.quantize.kv_cache == "float":
        return
    if not tasks.find_task(recipe.model.task).generates:
        raise RecipeError(
            f"float8 with task {recipe.model.task}, which has no KV cache",
            where="quantize.kv_cache",
            accepted="float",
            fix=f"Remove it, or use task {', '.join(tasks.list_generating())}.",
        )
    if not target.accepts.float8_cache:
        raise RecipeError(
            f"float8 is not accepted by target {target.name} ({at}): no scales of a KV cache are "
            "lowered to it",
            where="quantize.kv_cache",
            accepted="float",
            fix=f"Remove it, or use only targets that accept it: "
            f"{_others(lambda a: a.float8_cache)}.",
        )


def _check_float(recipe: Recipe, section: TargetSection, at: str) -> None:
    """Check before a run that no target asks for half precision of an ONNX file's or a torch
    module's graph, which stage export leaves as it is."""
    task, export = tasks.find_task(recipe.model.task), section.export
    if task.of_file and export is not None and export.float != "fp32":
        raise RecipeError(
            f"{export.float} with task {task.name}: the graph of an ONNX file or of a torch module "
            "stays in float32",
            where=f"{at}.float",
            accepted="fp32",
            fix="Write float: fp32 in the target.",
        )


def _check_one(weights: Weights, where: str, at: str, runtime: str, row: Accepts) -> None:
    """Check before a run that a target accepts one section of weights.

    where: path of the section in the recipe
    at: path of the target
    row: capabilities of the target
    """
    if weights.is_float and not row.float8:
        raise RecipeError(
            f"{weights.type} is not accepted by target {runtime} ({at}): such weights are not "
            "lowered to it",
            where=f"{where}.type",
            accepted="int",
            fix=f"Use type: int, or only targets that accept it: {_others(lambda a: a.float8)}.",
        )
    if not weights.symmetric and not row.weight_zero_point:
        raise RecipeError(
            f"false is not accepted by target {runtime} ({at}): it de-quantizes without zero "
            f"points",
            where=f"{where}.symmetric",
            fix=f"Use symmetric: true, or target {_others(lambda a: a.weight_zero_point)}.",
        )
    if weights.full_range and not row.full_range:
        raise RecipeError(
            f"true is not accepted by target {runtime} ({at}): it supports positive scales only",
            where=f"{where}.full_range",
            accepted="false",
            fix=f"Remove it, or use only targets that support it: "
            f"{_others(lambda a: a.full_range)}.",
        )
    if weights.group_size is not None and weights.group_size not in row.group_sizes:
        raise RecipeError(
            f"{weights.group_size} is not accepted by target {runtime} ({at}): it does not keep "
            "groups of that size packed",
            where=f"{where}.group_size",
            accepted=", ".join(map(str, row.group_sizes)),
        )
    if weights.bits < 8 and weights.granularity not in row.int4_granularities:
        raise RecipeError(
            f"{weights.granularity} with bits: {weights.bits} is not kept packed by target "
            f"{runtime} ({at}), so the file would not be smaller",
            where=f"{where}.granularity",
            accepted=", ".join(row.int4_granularities),
            fix="Use granularity: group with group_size: 32, 64 or 128.",
        )


def _check_activations(recipe: Recipe, at: str, section: TargetSection, target: Target) -> None:
    activations, runtime, row = recipe.quantize.activations, target.name, target.accepts
    if activations is None:
        return
    if section.device in row.no_integer_kernels:
        others = _others(lambda a: section.device not in a.no_integer_kernels, section.device)
        places = [f"target {others}"] * bool(others) + ["device: cpu"] * (section.device != "cpu")
        raise RecipeError(
            f"quantized activations have no integer kernels on {at}: "
            f"{row.no_integer_kernels[section.device]}",
            where="quantize.activations",
            fix=f"Use {', or '.join(places)}, or remove the block for weight-only quantization.",
        )
    if activations.granularity == "token" and not row.dynamic_activations:
        raise RecipeError(
            f"token is not accepted by target {runtime} ({at}): it supports static ranges only",
            where="quantize.activations.granularity",
            fix=f"Use granularity: tensor, or {_others(lambda a: a.dynamic_activations)} alone.",
        )
    if recipe.quantize.integer_attention and not row.integer_attention:
        raise RecipeError(
            f"int8 is not accepted by target {runtime} ({at}): its attention runs in float",
            where="quantize.activations.attention",
            fix=f"Use float, or target {_others(lambda a: a.integer_attention)} alone.",
        )
    for where, weights in targets.list_weight_blocks(recipe):
        if where in ("quantize.head", "quantize.embedding"):
            continue  # weight-only: inputs outside the blocks stay float
        of_eight = weights.bits == 8 and weights.granularity != "group" and weights.symmetric
        if of_eight or weights.is_float:
            continue
        groups = weights.bits < 8 and weights.granularity == "group"
        in_float = row.float_products if groups and activations.granularity == "tensor" else ""
        if in_float and section.allow_precision_fallback:
            continue
        accept = f", or set {at}.allow_precision_fallback: true: {in_float}"
        other = f"{accept}; the file stays small, the speed is that of float" if in_float else ""
        raise RecipeError(
            f"bits: {weights.bits}, granularity: {weights.granularity}, symmetric: "
            f"{str(weights.symmetric).lower()} with quantized activations has no integer kernel "
            f"on target {runtime} ({at})",
            where=where,
            accepted="bits: 8, granularity: channel or tensor, symmetric: true",
            fix=f"Remove the activations block for weight-only quantization{other}.",
        )
