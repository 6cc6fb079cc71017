"""Table of targets: one record per runtime, with measured facts about what it accepts.

Facts: TensorRT-RTX 1.7 parses neither zero points other than 0, uint8, nor run-time activation
ranges, and builds no Gather of int8 constants ("only allowed before DQ"). ONNX Runtime 1.31 turns
only power-of-two blocks from 16 to 256 into MatMulNBits; with static ranges it multiplies int4
blocks in float, and fuses int8 blocks into a MatMulIntegerToFloat that cannot run
(tests/lower/test_dialects.py). TensorRT-RTX builds an engine of neither. TensorRT shares RTX's
parser and its row; its limits are unmeasured.

Another distribution adds a target by an entry point of the group "optimizer.targets", a Target.
Checked against recipes by checks/accepted.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.references import list_entry_points, load_entry_point
from optimizer.harness.runtimes.trt.products import PRODUCTS
from optimizer.recipe.targets import (
    GROUP,
    CompressedTensorsTarget,
    GgufTarget,
    OnnxRuntimeTarget,
    OnnxRuntimeWebTarget,
    OpenVinoTarget,
    TensorRTTarget,
    VllmTarget,
)
from optimizer.targets.record import Accepts, BuildCost, Kernels, Target

if TYPE_CHECKING:
    from optimizer.recipe.compression.quantize import Weights
    from optimizer.recipe.schema import Recipe

__all__ = ["TARGETS", "Accepts", "BuildCost", "Kernels", "Target", "list_names", "look_up"]

ONNXRUNTIME = Target(
    name="onnxruntime",
    section=OnnxRuntimeTarget,
    accepts=Accepts(
        no_integer_kernels={
            "cuda": "ONNX Runtime has integer products with quantized activations on the CPU only "
            "(its CUDA provider lacks DynamicQuantizeMatMul and MatMulIntegerToFloat)"
        },
        float_products="ONNX Runtime rounds the inputs to integers, de-quantizes the blocks at "
        "every call and multiplies in float",
        adapters_on=("cpu",),
    ),
    lower="optimizer.lower.ort.lower:lower",
    fit="optimizer.lower.ort.build:fit",
    build="optimizer.lower.ort.build:build",
    open="optimizer.validate.target_runner:open_on_gpu_or_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    package="optimizer.package.genai_config:add",
    distributions=("onnxruntime", "onnxruntime-gpu"),
    extras={"cpu": "cpu"},
    cost=BuildCost(memory=440 << 20, copies=1.2),
)

ONNXRUNTIME_WEB = Target(
    name="onnxruntime-web",
    section=OnnxRuntimeWebTarget,
    accepts=Accepts(float_products=ONNXRUNTIME.accepts.float_products),
    check="optimizer.lower.web.accepted:check",
    lower="optimizer.lower.web.lower:lower",
    build="optimizer.lower.web.build:build",
    open="optimizer.validate.target_runner:open_lowered",
    answered_by="outputs of the model in ONNX Runtime on this CPU; the browser build serves it "
    "only after it reproduced recorded outputs",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    untimed="it runs in browsers, which are not timed here",
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
        integer_lookup=False,
        sparse_kernels=("2:4",),
    ),
    check="optimizer.lower.trt.accepted:check",
    lower="optimizer.lower.trt.lower:lower",
    fit="optimizer.lower.trt.build:fit",
    build="optimizer.lower.trt.build:build",
    engine_files=True,
    open="optimizer.validate.target_runner:open_engine_or_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    untimed="benchmarks/gpu/suite.py times its engines instead",
    distributions=PRODUCTS["tensorrt-rtx"].distributions,
    extras={"cuda": "rtx"},
    cost=BuildCost(memory=600 << 20, copies=3, seconds=4.0, rate=20e6),
)

OPENVINO = Target(
    name="openvino",
    section=OpenVinoTarget,
    accepts=Accepts(weight_zero_point=False, dynamic_activations=False, integer_attention=True),
    check="optimizer.lower.openvino.accepted:check",
    lower="optimizer.lower.openvino.lower:lower",
    fit="optimizer.lower.openvino.build:fit",
    build="optimizer.lower.openvino.build:build",
    open="optimizer.validate.target_runner:open_engine_or_lowered",
    hops="optimizer.validate.ledger.ledger:graph_hops",
    kernels=Kernels(
        reciprocal=True,
        behind_quantizers=True,
        open="optimizer.validate.target_runner:open_pieces_on_target",
    ),
    floats="optimizer.lower.openvino.build:float_baselines",
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
        int4_granularities=("group", "channel"),
        integer_lookup=False,
        zeros_alone=False,
        float8=True,
        float8_cache=True,
    ),
    check="optimizer.lower.compressed_tensors.serving_engines:check",
    check_model="optimizer.lower.compressed_tensors.config:check_model",
    lower="optimizer.lower.compressed_tensors.folder:lower",
    estimate="optimizer.lower.compressed_tensors.folder:estimate",
    files=("model/config.json", "model/*"),
    open="optimizer.validate.formats.compressed_tensors:open_runner",
    answered_by="outputs of the folder in transformers on the CPU, in float32; vLLM, which "
    "serves it, computes the same function with other kernels",
    hops="optimizer.validate.formats.compressed_tensors:hops",
    judged_by=("compressed-tensors",),
    untimed="vLLM serves it, whose kernels are not timed here",
    distributions=("compressed-tensors", "transformers"),
    extras={"cpu": "compressed-tensors"},
)

VLLM = replace(
    COMPRESSED_TENSORS,
    name="vllm",
    section=VllmTarget,
    check_model="optimizer.lower.compressed_tensors.vllm:check_model",
    fit="optimizer.lower.compressed_tensors.vllm:fit",
    build="optimizer.lower.compressed_tensors.vllm:build",
    untimed="`optimize bench` of the bundle times vLLM on a machine that has it",
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
            "and cannot read ranges or scales for them"
        },
        zeros_alone=False,
    ),
    check="optimizer.lower.gguf.accepted:check",
    check_model="optimizer.lower.gguf.architectures:check",
    lower="optimizer.lower.gguf.folder:lower",
    estimate="optimizer.lower.gguf.folder:estimate",
    files=("model.gguf",),
    open="optimizer.validate.formats.gguf:open_runner",
    answered_by="outputs of the file in transformers on the CPU, de-quantized to float32; "
    "llama.cpp, which serves it, rounds the inputs of quantized products to 8 bits",
    hops="optimizer.validate.formats.gguf:hops",
    judged_by=("gguf", "accelerate"),
    untimed="llama.cpp serves it, whose kernels are not timed here",
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
        VLLM,
        GGUF,
    )
}


def look_up(name: str) -> Target:
    """Return the record of the runtime `name`. Raises KeyError for an unknown name, TypeError for
    an entry point that is not a Target of that name."""
    if name in TARGETS:
        return TARGETS[name]
    record = load_entry_point(GROUP, name)
    if not isinstance(record, Target) or record.name != name:
        raise TypeError(f"the entry point {name} of {GROUP} is not a Target of that name")
    return record


def list_names() -> list[str]:
    """Return the names of all runtimes: those in TARGETS, then those of other distributions."""
    return list(dict.fromkeys([*TARGETS, *list_entry_points(GROUP)]))


def load_all() -> Iterator[Target]:
    """Yield the records of all runtimes. Records of other distributions that fail to load are
    skipped; `look_up` raises the reason where a recipe names one."""
    for name in list_names():
        with suppress(ImportError, AttributeError, TypeError, RecipeError):
            yield look_up(name)


def list_weight_blocks(recipe: Recipe) -> list[tuple[str, Weights]]:
    """Return (path in the recipe, section) of every section that describes quantized weights, e.g.
    "quantize.weights"."""
    quantize = recipe.quantize
    schemes = [("quantize.weights", quantize.weights)]
    schemes += [(f"quantize.layers.{i}.weights", r.weights) for i, r in enumerate(quantize.layers)]
    choices = quantize.allocate.choices if quantize.allocate else ()
    schemes += [(f"quantize.allocate.choices.{i}", w) for i, w in enumerate(choices)]
    named = (("head", quantize.head_weights), ("embedding", quantize.embedding))
    return schemes + [(f"quantize.{n}", w) for n, w in named if not isinstance(w, str)]
