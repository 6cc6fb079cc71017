"""The targets: one record per runtime, and the check of a recipe against what each accepts.

The check runs before any weight is read. What a record accepts are measured facts: TensorRT-RTX 1.7
parses no zero point other than 0, no uint8 and no run-time activation ranges, and builds no Gather
of int8 constants, "only allowed before DQ"; ONNX Runtime 1.31 turns only power-of-two blocks from
16 to 256 into MatMulNBits. Beside static ranges it multiplies blocks of int4 in float, and fuses
blocks of int8 into a MatMulIntegerToFloat that cannot run (tests/lower/test_dialects.py);
TensorRT-RTX builds no engine of either. TensorRT has RTX's row, whose parser it shares, unmeasured.
A target of another distribution is an entry point of the group "optimizer.targets", a Target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.references import from_entry_point, offered, resolve
from optimizer.harness import tasks
from optimizer.harness.runtimes.trt.products import PRODUCTS
from optimizer.recipe.targets import (
    CompressedTensorsTarget,
    GgufTarget,
    OnnxRuntimeTarget,
    OnnxRuntimeWebTarget,
    OpenVinoTarget,
    TargetSection,
    TensorRTTarget,
)
from optimizer.targets.record import GROUP, Accepts, BuildCost, Kernels, Target

if TYPE_CHECKING:
    from optimizer.recipe.compression.quantize import Weights
    from optimizer.recipe.schema import Recipe

__all__ = ["TARGETS", "Accepts", "BuildCost", "Kernels", "Target", "check", "names", "of"]

ONNXRUNTIME = Target(
    name="onnxruntime",
    section=OnnxRuntimeTarget,
    accepts=Accepts(
        no_integer_kernels={
            "cuda": "ONNX Runtime fuses codes of activations into products on the CPU only "
            "(DynamicQuantizeMatMul and MatMulIntegerToFloat are not among the CUDA provider's "
            "operators)"
        },
        float_products="ONNX Runtime rounds the inputs to their integers, de-quantizes the blocks "
        "at every call and multiplies in float",
    ),
    lower="optimizer.lower.ort.lower:lower",
    fit="optimizer.lower.ort.build:fit",
    build="optimizer.lower.ort.build:build",
    open="optimizer.validate.target_runner:open_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    package="optimizer.package.genai_config:add",
    distributions=("onnxruntime", "onnxruntime-gpu"),
    extras={"cpu": "cpu"},
    cost=BuildCost(copies=2),
)

ONNXRUNTIME_WEB = Target(
    name="onnxruntime-web",
    section=OnnxRuntimeWebTarget,
    accepts=Accepts(float_products=ONNXRUNTIME.accepts.float_products),
    check="optimizer.lower.web.accepted:check",
    lower="optimizer.lower.web.lower:lower",
    build="optimizer.lower.web.build:build",
    open="optimizer.validate.target_runner:open_lowered",
    answered_by="answers of the model as ONNX Runtime runs it on this CPU; its build for browsers, "
    "which serves it, answers only after it gave the same to recorded texts",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    untimed="it runs in browsers, whose kernels are not timed here",
    package="optimizer.package.web_page:add",
    distributions=ONNXRUNTIME.distributions,
    extras={"cpu": "cpu"},
    cost=BuildCost(copies=2, seconds=10.0),
)

RTX = Target(
    name="tensorrt-rtx",
    section=TensorRTTarget,
    accepts=Accepts(
        weight_zero_point=False,
        dynamic_activations=False,
        codes_looked_up=False,
        sparse_kernels=("2:4",),
    ),
    check="optimizer.lower.trt.accepted:check",
    lower="optimizer.lower.trt.lower:lower",
    fit="optimizer.lower.trt.build:fit",
    build="optimizer.lower.trt.build:build",
    engine_files=True,
    open="optimizer.validate.target_runner:open_engine_or_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    untimed="engines are timed beside their peers by benchmarks/gpu/gpu_suite.py",
    distributions=PRODUCTS["tensorrt-rtx"].distributions,
    extras={"cuda": "rtx"},
    cost=BuildCost(memory=600 << 20, copies=3, seconds=4.0, rate=20e6),
)

OPENVINO = Target(
    name="openvino",
    section=OpenVinoTarget,
    accepts=Accepts(weight_zero_point=False, dynamic_activations=False, integer_attention=True),
    check="optimizer.targets:of_decoders",
    lower="optimizer.lower.openvino.lower:lower",
    fit="optimizer.lower.openvino.build:fit",
    build="optimizer.lower.openvino.build:build",
    open="optimizer.validate.target_runner:open_engine_or_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    kernels=Kernels(
        reciprocal=True,
        behind_quantizers=True,
        open="optimizer.validate.target_runner:pieces_on_target",
    ),
    floats="optimizer.lower.openvino.build:float_forms",
    package="optimizer.package.openvino_genai:add",
    judged_by=("openvino",),
    distributions=("openvino",),
    extras=dict.fromkeys(("cpu", "gpu", "npu"), "openvino"),
    cost=BuildCost(copies=2, seconds=2.0),
)

COMPRESSED_TENSORS = Target(
    name="compressed-tensors",
    section=CompressedTensorsTarget,
    accepts=Accepts(
        int4_granularities=("group", "channel"), codes_looked_up=False, zeros_alone=False
    ),
    check="optimizer.lower.compressed_tensors.serving_engines:check",
    check_model="optimizer.lower.compressed_tensors.config:check_model",
    lower="optimizer.lower.compressed_tensors.folder:lower",
    estimate="optimizer.lower.compressed_tensors.folder:estimate",
    files=("model/config.json", "model/*"),
    open="optimizer.validate.formats.compressed_tensors:opened",
    answered_by="answers of the folder as transformers runs it on the CPU, in float32; vLLM, which "
    "serves it, computes the same function in its own kernels",
    hops="optimizer.validate.formats.compressed_tensors:hops",
    judged_by=("compressed-tensors",),
    untimed="it is served by vLLM, whose kernels are not timed here",
    distributions=("compressed-tensors", "transformers"),
    extras={"cpu": "compressed-tensors"},
)

GGUF = Target(
    name="gguf",
    section=GgufTarget,
    accepts=Accepts(
        dynamic_activations=False,
        group_sizes=(32, 64, 128, 256),
        int4_granularities=("group", "channel", "tensor"),
        full_range=True,
        no_integer_kernels={
            "cpu": "llama.cpp rounds the inputs of each product to 8 bits itself, in blocks of 32, "
            "and reads no ranges or scales of them"
        },
        zeros_alone=False,
    ),
    check="optimizer.lower.gguf.accepted:check",
    check_model="optimizer.lower.gguf.architectures:check",
    lower="optimizer.lower.gguf.folder:lower",
    estimate="optimizer.lower.gguf.folder:estimate",
    files=("model.gguf",),
    open="optimizer.validate.formats.gguf:opened",
    answered_by="answers of the file as transformers de-quantizes and runs it on the CPU, in "
    "float32; llama.cpp, which serves it, rounds the inputs of quantized products to 8 bits",
    hops="optimizer.validate.formats.gguf:hops",
    judged_by=("gguf", "accelerate"),
    untimed="it is served by llama.cpp, whose kernels are not timed here",
    distributions=("gguf", "transformers"),
    extras={"cpu": "gguf"},
)

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        ONNXRUNTIME,
        ONNXRUNTIME_WEB,
        RTX,
        replace(RTX, name="tensorrt", distributions=PRODUCTS["tensorrt"].distributions, extras={}),
        OPENVINO,
        COMPRESSED_TENSORS,
        GGUF,
    )
}


def of(name: str) -> Target:
    """The record of a runtime. Raises KeyError for one that neither the table nor an entry point
    has, TypeError for an entry point that is no record of that name."""
    if name in TARGETS:
        return TARGETS[name]
    record = from_entry_point(GROUP, name)
    if not isinstance(record, Target) or record.name != name:
        raise TypeError(f"the entry point {name} of {GROUP} is not a Target of that name")
    return record


def names() -> list[str]:
    """Of every runtime, the table's first."""
    return list(dict.fromkeys([*TARGETS, *offered(GROUP)]))


def _loadable() -> Iterator[Target]:
    """Every record, but for one of another distribution that cannot be loaded: `of` says why,
    where a recipe names it."""
    for name in names():
        with suppress(ImportError, AttributeError, TypeError, RecipeError):
            yield of(name)


def check(recipe: Recipe) -> None:
    """Raise RecipeError for the first thing a target of this recipe cannot express."""
    for i, section in enumerate(recipe.targets):
        target, at = of(section.runtime), f"targets.{i}"
        _check_weights(recipe, at, target)
        _check_activations(recipe, at, section, target)
        _check_zeros(recipe, at, target)
        if target.check:
            resolve(target.check)(recipe, section, at)
        _check_calibrated_length(recipe, section, at)


def of_decoders(recipe: Recipe, section: OpenVinoTarget, at: str) -> None:
    """The folder of OpenVINO GenAI is a decoder's, and so is a cache."""
    if tasks.task(recipe.model.task).generates:
        return
    if section.genai:
        raise RecipeError(
            f"true for {recipe.model.task}: OpenVINO GenAI opens models that continue texts",
            where=f"{at}.genai",
            accepted="false",
        )
    if section.rounds_cache:
        raise RecipeError(
            f"{section.kv_cache} for {recipe.model.task}, which keeps no keys and values",
            where=f"{at}.kv_cache",
            accepted="float",
        )


def _check_calibrated_length(recipe: Recipe, section: TargetSection, at: str) -> None:
    """Ranges measured on texts that no profile takes are ranges of something else."""
    if recipe.calibrate is None or not section.profiles:
        return
    length, generates = recipe.calibrate.sequence_length, tasks.task(recipe.model.task).generates
    spans = [
        (p.sequence[0], p.sequence[2] + (p.past[2] if generates else 0)) for p in section.profiles
    ]
    if not any(low <= length <= high for low, high in spans):
        raise RecipeError(
            f"no profile takes a sequence of {length}, which calibrate.sequence_length has",
            where=f"{at}.shapes.sequence",
            accepted=" or ".join(f"{low} to {high}" for low, high in spans),
            fix="Widen the profile, or calibrate at a length that will be run.",
        )


def _others(does: Callable[[Accepts], bool], device: str = "") -> str:
    """The names of the targets whose lowering does so; device: and that run on it."""
    return ", ".join(
        target.name
        for target in _loadable()
        if does(target.accepts) and (not device or device in target.section.devices())
    )


def _check_zeros(recipe: Recipe, at: str, target: Target) -> None:
    """Pruned weights that stay float, which few runtimes gain anything by."""
    sparsity, row = recipe.sparsity, target.accepts
    if sparsity is None or not recipe.quantize.leaves_float:
        return
    if not row.zeros_alone:
        raise RecipeError(
            f"sparsity alone is not accepted by target {target.name} ({at}): its format has no "
            "place for zeros, and nothing is quantized",
            where="sparsity",
            fix="Add a quantize section, e.g. quantize: {methods: [gptq], ...}, or remove "
            f"{target.name}.",
        )
    timed = recipe.validate_.latency.must_beat_float and not target.untimed
    if timed and str(sparsity.shape) not in row.sparse_kernels:
        raise RecipeError(
            f"true with sparsity alone: target {target.name} ({at}) multiplies by zeros as by "
            f"other numbers, so that {sparsity.shape} weights are no faster than dense ones",
            where="validate.latency.must_beat_float",
            fix="Set must_beat_float: false if zeros alone were the goal, add a quantize section, "
            "or use a target with sparse kernels: "
            f"{_others(lambda a: bool(a.sparse_kernels))} (2:4).",
        )


def weight_blocks(recipe: Recipe) -> list[tuple[str, Weights]]:
    """Every weights block of the recipe, and where it stands."""
    quantize = recipe.quantize
    schemes = [("quantize.weights", quantize.weights)]
    schemes += [(f"quantize.layers.{i}.weights", r.weights) for i, r in enumerate(quantize.layers)]
    choices = quantize.allocate.choices if quantize.allocate else ()
    schemes += [(f"quantize.allocate.choices.{i}", w) for i, w in enumerate(choices)]
    named = (("head", quantize.head_weights), ("embedding", quantize.embedding))
    return schemes + [(f"quantize.{n}", w) for n, w in named if not isinstance(w, str)]


def _check_weights(recipe: Recipe, at: str, target: Target) -> None:
    embedding, runtime, row = recipe.quantize.embedding, target.name, target.accepts
    if embedding != "float" and not row.codes_looked_up:
        raise RecipeError(
            f"a quantized embedding is not accepted by target {runtime} ({at}): it takes int8 "
            "constants only where they are de-quantized whole, not to look rows up",
            where="quantize.embedding",
            accepted="float",
            fix="Remove it, or use only targets that look up codes: "
            f"{_others(lambda a: a.codes_looked_up)}.",
        )
    if embedding != "float" and embedding.bits < 8:
        raise RecipeError(
            f"{embedding.bits} is not accepted by target {runtime} ({at}): rows of a table are "
            "looked up in whole bytes, so that nothing would be gained over 8",
            where="quantize.embedding.bits",
            accepted="8",
        )
    for where, weights in weight_blocks(recipe):
        _check_one(weights, where, at, runtime, row)


def _check_one(weights: Weights, where: str, at: str, runtime: str, row: Accepts) -> None:
    if not weights.symmetric and not row.weight_zero_point:
        raise RecipeError(
            f"false is not accepted by target {runtime} ({at}): it dequantizes with a scale only",
            where=f"{where}.symmetric",
            fix=f"Use symmetric: true, or target {_others(lambda a: a.weight_zero_point)}.",
        )
    if weights.full_range and not row.full_range:
        raise RecipeError(
            f"true is not accepted by target {runtime} ({at}): it takes positive scales",
            where=f"{where}.full_range",
            accepted="false",
            fix=f"Remove it, or use only targets that take it: {_others(lambda a: a.full_range)}.",
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


def _check_activations(recipe: Recipe, at: str, section: TargetSection, target: Target) -> None:
    activations, runtime, row = recipe.quantize.activations, target.name, target.accepts
    if activations is None:
        return
    if section.device in row.no_integer_kernels:
        others = _others(lambda a: section.device not in a.no_integer_kernels, section.device)
        places = [f"target {others}"] * bool(others) + ["device: cpu"] * (section.device != "cpu")
        raise RecipeError(
            f"quantized activations have no integer kernels there ({at}): "
            f"{row.no_integer_kernels[section.device]}",
            where="quantize.activations",
            fix=f"Use {', or '.join(places)}, or remove the block for weight-only compression.",
        )
    if activations.granularity == "token" and not row.dynamic_activations:
        raise RecipeError(
            f"token is not accepted by target {runtime} ({at}): it takes static ranges only",
            where="quantize.activations.granularity",
            fix=f"Use granularity: tensor, or {_others(lambda a: a.dynamic_activations)} alone.",
        )
    if recipe.quantize.integer_attention and not row.integer_attention:
        raise RecipeError(
            f"int8 is not accepted by target {runtime} ({at}): its attention runs in float",
            where="quantize.activations.attention",
            fix=f"Use float, or target {_others(lambda a: a.integer_attention)} alone.",
        )
    for where, weights in weight_blocks(recipe):
        if where in ("quantize.head", "quantize.embedding"):
            continue  # weight-only: outside the blocks no input is coded
        if weights.bits == 8 and weights.granularity != "group" and weights.symmetric:
            continue
        groups = weights.bits < 8 and weights.granularity == "group"
        in_float = row.float_products if groups and activations.granularity == "tensor" else ""
        if in_float and section.allow_precision_fallback:
            continue
        accept = f", or accept with {at}.allow_precision_fallback: true that {in_float}"
        other = f"{accept}: the file is as small, and no faster than float" if in_float else ""
        raise RecipeError(
            f"bits: {weights.bits}, granularity: {weights.granularity}, symmetric: "
            f"{str(weights.symmetric).lower()} with quantized activations has no integer kernel "
            f"on target {runtime} ({at})",
            where=where,
            accepted="bits: 8, granularity: channel or tensor, symmetric: true",
            fix=f"Remove the activations block for weight-only compression{other}.",
        )
