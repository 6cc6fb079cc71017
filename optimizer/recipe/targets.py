"""The targets of a recipe: what is built, and for which shapes."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from optimizer.foundation.sections.fields import LONG, Pattern
from optimizer.foundation.sections.section import Section
from optimizer.harness.bounds import THREADS
from optimizer.harness.runtimes.trt.products import PRODUCTS, Options


class Export(Section):
    """What the export stage reads: targets with the same float part share one graph."""

    float: Literal["fp32", "fp16"] = "fp32"
    opset: Literal[21] = 21


Positive = Annotated[int, Field(ge=1, le=LONG)]
Span = tuple[Positive, Positive, Positive]


Past = tuple[Annotated[int, Field(ge=0, le=LONG)], Positive, Positive]
AXES = ("batch", "sequence", "past")


class Bucket(Section):
    """One of several profiles: the axes in which it is narrower than the shapes around it."""

    batch: Span | None = None
    sequence: Span | None = None
    past: Past | None = None


class Shapes(Section):
    """What an engine takes: [min, opt, max] of each dynamic axis. One optimization profile, or
    one for each of `buckets`, whose kernels are then chosen for its own middle."""

    batch: Span = (1, 8, 32)
    sequence: Span = (16, 128, 256)
    past: Past = Field((0, 256, 1024), description="text-generation: tokens already in the cache")
    buckets: tuple[Bucket, ...] = ()

    def profiles(self) -> tuple[Shapes, ...]:
        """Each profile whole: every axis of a bucket, and no buckets."""
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
    """What every target has. A runtime's own keys stand in its class below; what a stage asks of
    any target is a key or a property here."""

    RENAMED: ClassVar[Mapping[str, str]] = {"allow_wider": "allow_precision_fallback"}

    runtime: str
    device: str = "cpu"
    on_fail: Literal["refuse", "drop"] = Field(
        "refuse",
        description="when this target's gates fail or cannot decide; refuse: no bundle is made; "
        "drop: the bundle is made of the other targets, and says so",
    )
    on_missing: Literal["fail", "defer"] = "fail"
    allow_precision_fallback: bool = Field(
        False, description="accept modules that run in higher precision than the recipe says"
    )

    @classmethod
    def devices(cls) -> tuple[str, ...]:
        """What `device:` may be; of a section that does not list them, its default."""
        field = cls.model_fields["device"]
        return get_args(field.annotation) or (str(field.default),)

    @property
    def without_on_fail(self) -> Self:
        """What the stages before package read: on_fail changes nothing of what they make, and so
        no step is redone for it."""
        return self.model_copy(update={"on_fail": "refuse"})

    @property
    def name(self) -> str:
        """In reports, and of the target's folders in a bundle."""
        return f"{self.runtime}-{self.device}"

    @property
    def export(self) -> Export | None:
        """What the export stage is to make; None: this target is lowered from the checkpoint and
        the state alone, and needs no graph."""
        return Export(float="fp32")

    @property
    def float_type(self) -> Literal["fp32", "fp16", "bf16"]:
        """What the unquantized part is stored and computed in."""
        return self.export.float if self.export else "fp32"

    @property
    def computes_in(self) -> Literal["fp32", "fp16", "bf16"]:
        """What the runtime computes the unquantized part in, where that is not how it is stored."""
        return self.float_type

    @property
    def intra_op_threads(self) -> int:
        """0: one per core."""
        return 0

    @property
    def rounds_cache(self) -> bool:
        """Whether keys and values are kept in fewer bits than they are computed in, so that what
        this costs has a gate of its own."""
        return False

    @property
    def execution_provider(self) -> str | None:
        """What compiles for the device, where the runtime itself does not."""
        return None

    @property
    def runs_on(self) -> str:
        """The provider or device, by the name the harness's table has for it."""
        return self.execution_provider or self.device

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        """The shapes an engine takes; none: it takes any."""
        return ()

    @property
    def depends_on_gpu(self) -> bool:
        """Whether what is built, or that nothing is, depends on the GPU of this machine."""
        return self.device != "cpu"

    @property
    def depends_on_processor(self) -> bool:
        """Whether what is built depends on what this machine's processor has kernels for."""
        return False

    @property
    def harness_packages(self) -> tuple[str, ...]:
        """Distributions that a bundle's harness imports for it, beside those of every target."""
        return ()

    @property
    def made_with(self) -> tuple[str, ...]:
        """Distributions that only what this section asks for needs, when it is made."""
        return ()

    def kernel_block(self, group_size: int) -> int:
        """Inputs per int8 block into which the kernels that judge it here, of quantized weights
        alone, round what they multiply; 0: none. group_size: of the weights, 0 where they have one
        scale per output. Where a target has no kernels of its own here, ONNX Runtime's are: its
        MatMulNBits takes the weights' groups, or 32 (session.qdq_matmulnbits_block_size)."""
        return group_size or 32


class OnnxRuntimeTarget(TargetSection):
    runtime: Literal["onnxruntime"]
    device: Literal["cpu", "cuda"] = "cpu"
    provider: Literal["tensorrt", "tensorrt-rtx"] | None = Field(
        None, description="device: cuda: compiles what it can of the graph; CUDA itself when null"
    )
    threads: int = Field(0, ge=0, le=THREADS, description="intra-op threads; 0: one per core")
    fuse_attention: bool = Field(
        True,
        description="text-generation: attentions as ONNX Runtime's GroupQueryAttention, which "
        "keeps the cache in place; of images on a CPU: as its MultiHeadAttention",
    )
    divide_batches: bool = Field(
        True, description="device: cpu: threads share large batches by rows; weights are kept twice"
    )

    @model_validator(mode="after")
    def _on_a_gpu(self) -> OnnxRuntimeTarget:
        if self.provider is not None and self.device != "cuda":
            raise ValueError(f"provider: {self.provider} needs device: cuda")
        return self

    @property
    def intra_op_threads(self) -> int:
        return self.threads

    @property
    def execution_provider(self) -> str | None:
        return self.provider

    @property
    def harness_packages(self) -> tuple[str, ...]:
        """tensorrt-rtx is a plugin of the build for the CPU."""
        return ("onnxruntime-gpu" if self.runs_on in ("cuda", "tensorrt") else "onnxruntime",)


class OnnxRuntimeWebTarget(TargetSection):
    """The ONNX of ONNX Runtime on a CPU, and a page that runs it in a browser, in wasm."""

    runtime: Literal["onnxruntime-web"]
    device: Literal["cpu"] = "cpu"
    threads: int = Field(
        0, ge=0, le=THREADS, description="of the browser; 0: half of its cores, and 4 at most"
    )
    include_float: bool = Field(
        False, description="the float model is in the bundle too, so that the page times both"
    )
    npm: Pattern = Field(
        "https://registry.npmjs.org",
        description="an npm registry, or a folder that holds the packages' .tgz files",
    )

    @property
    def name(self) -> str:
        return self.runtime

    @property
    def intra_op_threads(self) -> int:
        return self.threads


class OpenVinoTarget(TargetSection):
    """The portable ONNX in OpenVINO. `float` is told to the runtime: the file is the same."""

    runtime: Literal["openvino"]
    device: Literal["cpu", "gpu", "npu"] = "cpu"
    float: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="what is not quantized is computed in; where the device has it"
    )
    threads: int = Field(0, ge=0, le=THREADS, description="of a request; 0: one per core")
    hint: Literal["latency", "throughput"] = Field(
        "latency", description="throughput: several requests at once, on fewer threads each"
    )
    dynamic_quantization: Literal[0, 32, 64, 128] = Field(
        0,
        description="of weights alone: inputs per int8 block into which the kernels may round what "
        "they multiply; 0: they multiply what they are given",
    )
    kv_cache: Literal["float", "int8"] = Field(
        "float",
        description="text-generation: what keys and values are kept in; int8 takes about a third "
        "of the memory, and held-out text read through it is a gate of its own",
    )
    genai: bool = Field(
        False, description="text-generation: also the folder that OpenVINO GenAI opens"
    )

    @model_validator(mode="after")
    def _judged_together(self) -> OpenVinoTarget:
        if self.dynamic_quantization and self.float != "fp32":
            raise ValueError(
                f"dynamic_quantization: {self.dynamic_quantization} is judged with float: fp32 only"
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


class CompressedTensorsTarget(TargetSection):
    """A Hugging Face folder that transformers loads and vLLM serves. It is lowered from the
    checkpoint: no graph is exported, and nothing is built."""

    runtime: Literal["compressed-tensors"]
    device: Literal["cpu"] = Field("cpu", description="where transformers runs it to judge it")
    float: Literal["fp32", "fp16", "bf16"] = Field(
        "bf16", description="what the unquantized part and the scales are stored in"
    )
    serve_with: tuple[Literal["vllm", "vllm-cpu", "sglang"], ...] = Field(
        (), description="programs that must take every scheme in it; of others SERVING.md warns"
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


class GgufTarget(TargetSection):
    """One file that llama.cpp runs. It is lowered from the checkpoint: no graph is exported, and
    nothing is built."""

    runtime: Literal["gguf"]
    device: Literal["cpu"] = Field("cpu", description="where transformers runs it to judge it")
    float: Literal["fp32", "fp16", "bf16"] = Field(
        "fp16", description="what unquantized matrices are stored in; vectors are fp32"
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
    """Any product of the family; targets.py says which has which option."""

    runtime: Literal["tensorrt-rtx", "tensorrt"]
    device: Literal["cuda"] = "cuda"
    shapes: Shapes = Shapes()
    float: Literal["fp32", "fp16"] = Field("fp16", description="what the unquantized part runs in")
    compute_capabilities: tuple[Literal["75", "80", "86", "89", "120", "121"], ...] = Field(
        (), description="GPU generations the engine is built for; the builder's default when empty"
    )
    workspace_gb: Annotated[builtins.float, Field(gt=0, le=100_000)] | None = Field(
        None, description="device memory a kernel may use while it runs; the builder's own limit"
    )
    sparse_weights: bool | None = Field(
        None,
        description="kernels for 2:4 sparse weights where faster; null: where the recipe prunes so",
    )
    hardware_compatible: Literal["none", "ampere_plus", "same_compute_capability"] = Field(
        "none", description="GPUs beyond the one it is built on"
    )
    version_compatible: bool = Field(False, description="later versions of the runtime load it")
    refittable: bool = Field(False, description="weights can be replaced without a build")
    strip_weights: bool = Field(False, description="weights come from the ONNX when it is loaded")

    @property
    def export(self) -> Export:
        return Export(float=self.float)

    @property
    def profiles(self) -> tuple[Shapes, ...]:
        return self.shapes.profiles()

    @property
    def options(self) -> Options:
        """What the builder is told, beside the shapes."""
        return Options.from_json(self.model_dump() | {"sparse_weights": bool(self.sparse_weights)})

    @property
    def depends_on_gpu(self) -> bool:
        product = PRODUCTS[self.runtime]
        return product.needs_gpu or bool(product.with_gpu & set(self.options.chosen()))
