"""The targets of a recipe: what is built, and for which shapes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from optimizer.recipe_data import Section


class Export(Section):
    """What the export stage reads: targets with the same float part share one graph."""

    float: Literal["fp32", "fp16"] = "fp32"
    opset: Literal[21] = 21


Positive = Annotated[int, Field(ge=1)]
Span = tuple[Positive, Positive, Positive]


class Shapes(Section):
    """One optimization profile: [min, opt, max] of each dynamic axis."""

    batch: Span = (1, 8, 32)
    sequence: Span = (16, 128, 256)
    past: tuple[Annotated[int, Field(ge=0)], Positive, Positive] = Field(
        (0, 256, 1024), description="text-generation: tokens already in the cache"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Shapes:
        for axis in ("batch", "sequence", "past"):
            low, opt, high = getattr(self, axis)
            if not low <= opt <= high:
                raise ValueError(
                    f"{axis}: [{low}, {opt}, {high}] must be [min, opt, max], ascending"
                )
        return self


class OnnxRuntimeTarget(Section):
    runtime: Literal["onnxruntime"]
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = Field(0, ge=0, description="intra-op threads; 0: one per core")
    fuse_attention: bool = Field(
        True,
        description="text-generation: attentions as ONNX Runtime's GroupQueryAttention, which "
        "keeps the cache in place",
    )
    on_missing: Literal["fail", "defer"] = "fail"
    allow_fallback: bool = Field(False, description="accept modules that run wider than asked")

    @property
    def export(self) -> Export:
        return Export(float="fp32")


class TensorRTRTXTarget(Section):
    runtime: Literal["tensorrt-rtx"]
    device: Literal["cuda"] = "cuda"
    shapes: Shapes = Shapes()
    float: Literal["fp32", "fp16"] = Field("fp16", description="what the unquantized part runs in")
    compute_capabilities: tuple[Literal["75", "80", "86", "89", "120", "121"], ...] = Field(
        (), description="GPU generations the engine is built for; the builder's default when empty"
    )
    on_missing: Literal["fail", "defer"] = "fail"
    allow_fallback: bool = False

    @property
    def export(self) -> Export:
        return Export(float=self.float)


Target = Annotated[OnnxRuntimeTarget | TensorRTRTXTarget, Field(discriminator="runtime")]
