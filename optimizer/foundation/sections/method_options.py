"""What a recipe can say to each method of compression: a section per method, with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from optimizer.foundation.sections.fields import MANY, BatchSize, Seed
from optimizer.foundation.sections.section import Section


class HessianOptions(Section):
    """Of every method that chooses by the second moments of a weight's inputs; what they are made
    of is said in optimizer/compress/methods/weights/hessian.py."""

    RENAMED: ClassVar[Mapping[str, str]] = {"asymmetric": "float_target"}

    act_order: bool = Field(
        True, description="round the inputs with the largest second moment first (static groups)"
    )
    damping: float = Field(
        0.01,
        gt=0,
        le=1,
        description="share of the mean diagonal added to the Hessian's; ten "
        "times as much, and again, while it cannot be factored (recorded)",
    )
    float_target: bool | None = Field(
        None,
        description="aim at the float model's output, so that earlier errors are made up for; true "
        "unless activations have static ranges, whose coarse codes it would fit",
    )
    token_limit: float = Field(
        4.0,
        gt=0,
        le=1e12,
        description="a token counts for at most so many median lengths; massive activations of a "
        "few would be all that counts",
    )
    first_token: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="the first token of a text, on which attention rests, stands for at least this "
        "share of its tokens",
    )


class GptqOptions(HessianOptions):
    """optimizer/compress/methods/weights/gptq.py"""

    RENAMED: ClassVar[Mapping[str, str]] = {
        **HessianOptions.RENAMED,
        "widest": "max_scale_ratio",
    }

    max_scale_ratio: float = Field(
        2.0,
        gt=1,
        le=1e6,
        description="no scale is more than so many times what covers its weights, nor so many "
        "times less",
    )


class SparsegptOptions(HessianOptions):
    """optimizer/compress/methods/pruning/sparsegpt.py"""

    sweeps: int = Field(
        2, ge=0, le=100, description="rounds of improving what is kept, each given all the rest"
    )


class AwqOptions(Section):
    """optimizer/compress/methods/activations/awq.py"""

    clip: bool = Field(True, description="search for the range of each group after scaling")


class RotationOptions(Section):
    """optimizer/compress/methods/activations/rotation.py"""

    residual: bool = Field(True, description="rotate the residual stream; unties a tied head")
    values: bool = Field(True, description="rotate each head's values, undone in the projection")
    seed: Seed = 0


class AutoroundOptions(Section):
    """optimizer/compress/methods/weights/autoround.py"""

    steps: int = Field(
        200, ge=1, le=MANY, description="sign-gradient steps per block, a batch each"
    )
    seed: Seed = 0


class ModelTuningOptions(Section):
    """Of every method that tunes the whole model after the walk."""

    held_out: int = Field(3, ge=1, le=MANY, description="windows that only judge")
    samples: int = Field(
        0,
        ge=0,
        le=MANY,
        description="windows of calibrate.data behind those of calibrate.samples that only this "
        "method learns from",
    )
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="windows of the model's own text that only this method learns from, besides "
        "those of calibrate.generated",
    )

    @property
    def times_learned(self) -> int:
        """How often each window is learned from, as `plan` takes it."""
        return 1


class ScaleTuningOptions(ModelTuningOptions):
    """optimizer/compress/methods/weights/scale_tuning.py; holds the whole model in memory"""

    RENAMED: ClassVar[Mapping[str, str]] = {"together": "batch_size"}

    epochs: int = Field(2, ge=1, le=MANY, description="times through the calibration windows")
    batch_size: BatchSize = Field(2, description="windows per step")
    seed: Seed = 0

    @property
    def times_learned(self) -> int:
        return self.epochs
