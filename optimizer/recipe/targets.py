"""Sections of targets: one class per runtime, and the shapes that engines accept."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from optimizer.foundation.sections.fields import LONG, Pattern
from optimizer.foundation.sections.section import Section
from optimizer.harness.bounds import THREADS
from optimizer.harness.runtimes.trt.products import PRODUCTS, BuildOptions


class Export(Section):
    """Recipe section of the export stage; targets with equal sections share a graph."""

    float: Literal["fp32", "fp16"] = "fp32"
    opset: Literal[21] = 21


Positive = Annotated[int, Field(ge=1, le=LONG)]
Span = tuple[Positive, Positive, Positive]


Past = tuple[Annotated[int, Field(ge=0, le=LONG)], Positive, Positive]
AXES = ("batch", "sequence", "past")


class Bucket(Section):
    """Recipe section on one optimization profile: axes with narrower ranges than in `Shapes`."""

    batch: Span | None = None
    sequence: Span | None = None
    past: Past | None = None


class Shapes(Section):
    """Recipe section on the shapes that an engine accepts: [min, opt, max] of each dynamic axis.
    One optimization profile, or one per bucket, with kernels chosen for that bucket's `opt`."""

    batch: Span = (1, 8, 32)
    sequence: Span = (16, 128, 256)
    past: Past = Field((0, 256, 1024), description="text-generation: tokens already in the cache")
    buckets: tuple[Bucket, ...] = ()

    def profiles(self) -> tuple[Shapes, ...]:
        """Return the recipe's profiles, each with every axis and without buckets."""
        plain = {axis: getattr(self, axis) for axis in AXES}
        return tuple(
            Shapes(**(plain | {a: s for a in AXES if (s := getattr(bucket, a)) is not None}))
            for bucket in self.buckets or (Bucket(),)
        )

    @model_validator(mode="after")
    def _ordered(self) -> Shapes:
        for axis in AXES:
            low, opt, high = getattr(self, axis)
            _check_order(axis, low, opt, high)
            for i, bucket in enumerate(self.buckets):
                span = getattr(bucket, axis)
                if span is None:
                    continue
                _check_order(f"buckets.{i}.{axis}", *span)
                if span[0] < low or span[2] > high:
                    raise ValueError(
                        f"buckets.{i}.{axis}: {list(span)} is not inside {axis}: "
                        f"[{low}, {opt}, {high}]"
                    )
        return self


def _check_order(where: str, low: int, opt: int, high: int) -> None:
    if not low <= opt <= high:
        raise ValueError(f"{where}: [{low}, {opt}, {high}] must be [min, opt, max], ascending")


class TargetSection(Section):
    """Recipe section on any target; classes below add the keys of one runtime."""

    RENAMED: ClassVar[Mapping[str, str]] = {"allow_wider": "allow_precision_fallback"}

    runtime: str
    device: str = "cpu"
    on_fail: Literal["refuse", "drop"] = Field(
        "refuse",
        description="action when a gate of this target fails or is inconclusive; refuse: no "
        "bundle; drop: a bundle of the other targets, which records the omission",
    )
    on_missing: Literal["fail", "defer"] = "fail"
    allow_precision_fallback: bool = Field(
        False, description="accept modules that run in higher precision than the recipe says"
    )

    @classmethod
    def devices(cls) -> tuple[str, ...]:
        """Return a recipe's accepted values of `device:`; where not listed, the default."""
        field = cls.model_fields["device"]
        return get_args(field.annotation) or (str(field.default),)

    @property
    def without_on_fail(self) -> Self:
        """Section with the default `on_fail`, for stages before package, so that changing it
        repeats none."""
        return self.model_copy(update={"on_fail": "refuse"})

    @property
    def name(self) -> str:
        """Name of the recipe's target in reports, and of its folders in a bundle."""
        return f"{self.runtime}-{self.device}"

    @property
    def export(self) -> Export | None:
        """Recipe section of the export stage; None for a target without an exported graph."""
        return Export(float="fp32")

    @property
    def float_type(self) -> Literal["fp32", "fp16", "bf16"]:
        """Float type in which the recipe stores the unquantized part."""
        return self.export.float if self.export else "fp32"

    @property
    def computes_in(self) -> Literal["fp32", "fp16", "bf16"]:
        """Float type in which the recipe's runtime computes the unquantized part."""
        return self.float_type

    @property
    def intra_op_threads(self) -> int:
        """The recipe's threads per request; 0: one per core."""
        return 0

    @property
    def rounds_cache(self) -> bool:
        """True where the recipe's KV cache has fewer bits than attention computes in; this has a
        separate gate."""
        return False

    @property
    def lowers_float(self) -> bool:
        """True where the float baseline is lowered too, because operators of the target speed it
        up."""
        return False

    @property
    def execution_provider(self) -> str | None:
        """Execution provider that compiles for the recipe's device, if any does."""
        return None

    @property
    def runs_on(self) -> str:
        """Provider or device in the recipe, as named in the harness's table of runtimes."""
        return self.execution_provider or self.device

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        """Optimization profiles of a TensorRT engine: the shapes (least, best, most) that it is
        built for. () for engines of other runtimes, which accept any shape."""
        return ()

    @property
    def depends_on_gpu(self) -> bool:
        """True where this recipe section builds otherwise on another GPU."""
        return self.device != "cpu"

    @property
    def depends_on_processor(self) -> bool:
        """True where this recipe section builds otherwise on another processor."""
        return False

    @property
    def harness_packages(self) -> tuple[str, ...]:
        """Distributions that a bundle's harness imports only for this target."""
        return ()

    @property
    def made_with(self) -> tuple[str, ...]:
        """Distributions that packaging needs for this section's options."""
        return ()

    def kernel_block(self, group_size: int) -> int:
        """Return the size of the blocks in which the kernels that judge this target here round
        activations to int8 under weight-only quantization; 0: no rounding. The default is that of
        ONNX Runtime's MatMulNBits: the weights' group size, or 32
        (session.qdq_matmulnbits_block_size).

        group_size: group size of the weights; 0: one scale per output
        """
        return group_size or 32


class OnnxRuntimeTarget(TargetSection):
    """Recipe section on ONNX Runtime as a target, on a CPU or a GPU."""

    runtime: Literal["onnxruntime"]
    device: Literal["cpu", "cuda"] = "cpu"
    provider: Literal["tensorrt", "tensorrt-rtx"] | None = Field(
        None,
        description="device: cuda: execution provider that compiles the parts it "
        "supports; null: CUDA",
    )
    float: Literal["fp32", "fp16"] | None = Field(
        None,
        description="float type of the unquantized part; null: fp16 on cuda, fp32 on a CPU, whose "
        "kernels compute in fp32",
    )
    threads: int = Field(0, ge=0, le=THREADS, description="intra-op threads; 0: one per core")
    fuse_attention: bool = Field(
        True,
        description="text-generation: use ONNX Runtime's GroupQueryAttention, which updates the KV "
        "cache in place; images, and every encoder on cuda: its MultiHeadAttention",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="device: cuda: replay one CUDA graph for each size: of an encoder's batch, "
        "padded to powers of two, and of a decoder's step of one token; null: true there",
    )
    divide_batches: bool = Field(
        True,
        description="device: cpu: split large batches by rows over threads; weights are held twice",
    )

    @field_validator("float", mode="before")
    @classmethod
    def _not_in_bfloat16(cls, value: Any) -> Any:
        if value == "bf16":
            raise ValueError(
                "bf16 is not lowered for ONNX Runtime: its CPU kernels, on which the ledger proves "
                "a model, do not compute in it; use fp16, or fp32 for a model that overflows in "
                "fp16, or target vllm for a decoder"
            )
        return value

    @model_validator(mode="after")
    def _on_a_gpu(self) -> OnnxRuntimeTarget:
        if self.provider is not None and self.device != "cuda":
            raise ValueError(f"provider: {self.provider} needs device: cuda")
        if self.float == "fp16" and self.device != "cuda":
            raise ValueError("float: fp16 needs device: cuda; the kernels of a CPU compute in fp32")
        if self.cuda_graphs and (self.device != "cuda" or self.provider is not None):
            raise ValueError("cuda_graphs: true needs device: cuda, without a provider")
        return self

    @property
    def export(self) -> Export:
        return Export(float=self.float or ("fp16" if self.device == "cuda" else "fp32"))

    @property
    def lowers_float(self) -> bool:
        return self.device == "cuda"

    @property
    def replays_graphs(self) -> bool:
        """True where decoding replays CUDA graphs by the recipe; TensorRT providers cannot."""
        return self.device == "cuda" and self.provider is None and self.cuda_graphs is not False

    @property
    def intra_op_threads(self) -> int:
        return self.threads

    @property
    def execution_provider(self) -> str | None:
        return self.provider

    @property
    def harness_packages(self) -> tuple[str, ...]:
        """Distributions that the harness imports; tensorrt-rtx is a plugin of the CPU build."""
        return ("onnxruntime-gpu" if self.runs_on in ("cuda", "tensorrt") else "onnxruntime",)


class OnnxRuntimeWebTarget(TargetSection):
    """Recipe section on the browser as a target: ONNX model, and a page that runs it by wasm."""

    runtime: Literal["onnxruntime-web"]
    device: Literal["cpu"] = "cpu"
    threads: int = Field(
        0, ge=0, le=THREADS, description="threads of the browser; 0: half of its cores, at most 4"
    )
    include_float: bool = Field(
        False, description="include the float model in the bundle, so that the page times both"
    )
    npm: Pattern = Field(
        "https://registry.npmjs.org",
        description="npm registry, or a folder with the packages' .tgz files",
    )

    @property
    def name(self) -> str:
        return self.runtime

    @property
    def intra_op_threads(self) -> int:
        return self.threads


class OpenVinoTarget(TargetSection):
    """Recipe section on OpenVINO as a target. `float` is a runtime's setting, not the file's."""

    runtime: Literal["openvino"]
    device: Literal["cpu", "gpu", "npu"] = "cpu"
    float: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="float type of the unquantized part, where the device has it"
    )
    threads: int = Field(0, ge=0, le=THREADS, description="threads per request; 0: one per core")
    hint: Literal["latency", "throughput"] = Field(
        "latency", description="throughput: several requests at once, each on fewer threads"
    )
    dynamic_quantization: Literal[0, 32, 64, 128] = Field(
        0,
        description="weight-only quantization: block size in which kernels may round "
        "activations to int8; 0: no rounding",
    )
    kv_cache: Literal["float", "int8"] = Field(
        "float",
        description="text-generation: type of the KV cache; int8 takes about a third of the memory "
        "and has a separate gate on held-out text",
    )
    genai: bool = Field(
        False, description="text-generation: also write the folder that OpenVINO GenAI opens"
    )

    @model_validator(mode="after")
    def _judged_together(self) -> OpenVinoTarget:
        if self.dynamic_quantization and self.float != "fp32":
            raise ValueError(
                f"dynamic_quantization: {self.dynamic_quantization} needs float: fp32, not "
                f"{self.float}"
            )
        if self.kv_cache == "int8" and self.device != "cpu":
            raise ValueError(f"kv_cache: int8 needs device: cpu, not {self.device}")
        return self

    @property
    def computes_in(self) -> Literal["fp32", "fp16", "bf16"]:
        return self.float

    @property
    def intra_op_threads(self) -> int:
        return self.threads

    @property
    def depends_on_processor(self) -> bool:
        return True

    @property
    def rounds_cache(self) -> bool:
        return self.kv_cache == "int8"

    @property
    def harness_packages(self) -> tuple[str, ...]:
        return ("openvino",)

    @property
    def made_with(self) -> tuple[str, ...]:
        return ("openvino-tokenizers",) if self.genai else ()

    def kernel_block(self, _group_size: int) -> int:
        return self.dynamic_quantization


class _HuggingFaceFolder(TargetSection):
    """Recipe section on a target that is a folder lowered without an exported graph."""

    device: Literal["cpu"] = Field(
        "cpu", description="device on which transformers runs it for validation"
    )
    float: Literal["fp32", "fp16", "bf16"] = Field(
        "bf16", description="float type of the unquantized part and the scales"
    )

    @property
    def name(self) -> str:
        return self.runtime

    @property
    def export(self) -> None:
        return None

    @property
    def float_type(self) -> Literal["fp32", "fp16", "bf16"]:
        return self.float


class CompressedTensorsTarget(_HuggingFaceFolder):
    """Recipe section on a Hugging Face folder for transformers and vLLM, without a build."""

    runtime: Literal["compressed-tensors"]
    serve_with: tuple[Literal["vllm", "vllm-cpu", "sglang"], ...] = Field(
        (), description="programs that must support every scheme; SERVING.md warns about others"
    )


class VllmTarget(_HuggingFaceFolder):
    """Recipe section on a compressed-tensors folder and the sizes with which vLLM is started."""

    runtime: Literal["vllm"]
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="GPUs that share each layer")
    pipeline_parallel_size: int = Field(
        1, ge=1, le=1024, description="parts of the layers, on GPUs of their own"
    )
    max_model_len: int | None = Field(
        None, ge=1, le=LONG, description="tokens of a prompt with its answer; null: the model's"
    )

    @property
    def serve_with(self) -> tuple[Literal["vllm"], ...]:
        """Programs that must support every scheme of the recipe."""
        return ("vllm",)


class GgufTarget(TargetSection):
    """Recipe section on llama.cpp as a target: a GGUF file, without an exported graph or a
    build."""

    runtime: Literal["gguf"]
    device: Literal["cpu"] = Field(
        "cpu", description="device on which transformers runs it for validation"
    )
    float: Literal["fp32", "fp16", "bf16"] = Field(
        "fp16", description="float type of unquantized matrices; vectors are fp32"
    )

    @property
    def name(self) -> str:
        return self.runtime

    @property
    def export(self) -> None:
        return None

    @property
    def float_type(self) -> Literal["fp32", "fp16", "bf16"]:
        return self.float


class TensorRTTarget(TargetSection):
    """Recipe section on a target of TensorRT or TensorRT-RTX (harness/runtimes/trt/products.py)."""

    runtime: Literal["tensorrt-rtx", "tensorrt"]
    device: Literal["cuda"] = "cuda"
    shapes: Shapes = Shapes()
    float: Literal["fp32", "fp16"] = Field("fp16", description="float type of the unquantized part")
    compute_capabilities: tuple[Literal["75", "80", "86", "89", "120", "121"], ...] = Field(
        (), description="compute capabilities the engine is built for; default: the builder's"
    )
    workspace_gb: Annotated[builtins.float, Field(gt=0, le=100_000)] | None = Field(
        None, description="device memory in GB that a kernel may use; default: the builder's limit"
    )
    sparse_weights: bool | None = Field(
        None,
        description="use 2:4 sparse kernels where faster; null: where the recipe prunes 2:4",
    )
    hardware_compatible: Literal["none", "ampere_plus", "same_compute_capability"] = Field(
        "none", description="GPUs that can run the engine, beyond the one it is built on"
    )
    version_compatible: bool = Field(
        False, description="allow later versions of the runtime to load it"
    )
    refittable: bool = Field(False, description="allow weights to be replaced without a build")
    strip_weights: bool = Field(
        False, description="read weights from the ONNX file when it is loaded"
    )

    @property
    def export(self) -> Export:
        return Export(float=self.float)

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        return self.shapes.profiles()

    @property
    def options(self) -> BuildOptions:
        """The recipe's options of TensorRT's engine builder, without the shapes."""
        return BuildOptions.from_json(
            self.model_dump() | {"sparse_weights": bool(self.sparse_weights)}
        )

    @property
    def depends_on_gpu(self) -> bool:
        product = PRODUCTS[self.runtime]
        return product.needs_gpu or bool(product.with_gpu & set(self.options.changed()))


SECTIONS: Mapping[str, type[TargetSection]] = {
    runtime: section
    for section in (
        OnnxRuntimeTarget,
        OnnxRuntimeWebTarget,
        TensorRTTarget,
        OpenVinoTarget,
        CompressedTensorsTarget,
        VllmTarget,
        GgufTarget,
    )
    for runtime in get_args(section.model_fields["runtime"].annotation)
}
"""{runtime: class of its section}. Other distributions add theirs by an entry point of GROUP."""
GROUP = "optimizer.targets"
