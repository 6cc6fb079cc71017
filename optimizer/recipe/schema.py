"""The recipe: its schema and its defaults, which are nowhere else.

Frozen pydantic models with strict types and no extra keys. `recipe_file.read` makes one from
YAML; `schema()` is the JSON schema for editors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from optimizer.errors import closest
from optimizer.harness import tasks
from optimizer.recipe import methods
from optimizer.recipe.data import DataSpec, Section
from optimizer.recipe.fields import (
    MANY,
    BatchSize,
    Inside,
    Length,
    Name,
    Pattern,
    Seed,
    Version,
)
from optimizer.recipe.quantize import Activations, LayerRule, Quantize, Weights
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.targets import (
    CompressedTensorsTarget,
    Export,
    OnnxRuntimeTarget,
    Shapes,
    TargetSection,
    TensorRTTarget,
)
from optimizer.recipe.validate import (
    EvaluationSet,
    Latency,
    Metric,
    Validate,
    check_metric,
    check_timing,
)

__all__ = [
    "Activations",
    "CompressedTensorsTarget",
    "DataSpec",
    "EvaluationSet",
    "Export",
    "Latency",
    "LayerRule",
    "Metric",
    "OnnxRuntimeTarget",
    "Quantize",
    "Section",
    "Shapes",
    "TargetSection",
    "TensorRTTarget",
    "Validate",
    "Weights",
]


def _task(name: str) -> tasks.Task:
    """The record of a task. Raises ValueError for one that is not known."""
    try:
        return tasks.task(name)
    except KeyError:
        known = tasks.names()
        raise ValueError(
            f"{name!r} is not a task{closest(name, known)} Accepted: {', '.join(known)}"
        ) from None


def _list_tasks(schema: dict[str, Any]) -> None:
    schema["enum"] = tasks.names()


Task = Annotated[
    str, AfterValidator(lambda name: _task(name).name), Field(json_schema_extra=_list_tasks)
]


class Model(Section):
    """Which checkpoint, and what it is for."""

    source: Pattern = Field(description="hub id | folder | python-package:<name>")
    revision: Pattern | None = Field(
        None, description="a commit or tag; resolved to a commit and pinned"
    )
    subfolder: Inside | None = Field(None, description="the model's folder inside the source")
    task: Task
    pooling: Literal["mean", "cls"] | None = Field(
        None, description="sentence-embedding only; read from the checkpoint when absent, else mean"
    )
    normalize: bool | None = Field(
        None,
        description="sentence-embedding only: L2-normalize the embedding; read from the checkpoint "
        "when absent, else true",
    )
    max_length: Length | None = Field(
        None, description="longest sequence in tokens; read from the checkpoint when absent"
    )
    gguf_file: Pattern | None = Field(
        None, description="a GGUF file in the source, de-quantized to float and taken as the model"
    )
    allow_pickle: bool = False
    trust_remote_code: bool = False


class Calibrate(Section):
    data: DataSpec
    samples: int = Field(
        256,
        ge=1,
        le=MANY,
        description="texts; for text-generation windows of sequence_length tokens",
    )
    sequence_length: Length = Field(
        128,
        description="texts are cut to this many tokens; for "
        "text-generation they are joined and cut into windows of exactly as many",
    )
    batch_size: BatchSize = 8
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="text-generation: windows of the float model's own text beside the given ones; "
        "the whole model is in memory to write them",
    )
    seed: Seed = 0


def data_specs(calibrate: Calibrate | None, validate: Validate) -> dict[str, DataSpec]:
    """Every data set by its place in the recipe."""
    named = {
        "calibrate": calibrate.data if calibrate else None,
        "validate.data": validate.data,
        **{f"validate.also.{name}.data": part.data for name, part in validate.also.items()},
        "validate.train": validate.train,
        "validate.latency.data": validate.latency.data,
    }
    return {place: spec for place, spec in named.items() if spec is not None}


class Package(Section):
    RENAMED: ClassVar[Mapping[str, str]] = {
        "formats": "targets: [{runtime: compressed-tensors}]",
        "float": "targets: [{runtime: compressed-tensors, float: ...}]",
    }

    tar: bool = True
    version: Version = "1"
    licence: str = Field("", description="of the model; read from the checkpoint when empty")


class Compress(Section):
    """How the walk over the blocks is carried out."""

    memory_gb: float = Field(
        4.0,
        ge=1e-9,
        le=100_000,
        description="activations kept in memory; what is beyond it goes to disk",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="what products are computed in while calibrating; bf16 is several times faster "
        "on processors that have it",
    )


class Compression(Section):
    """What the compress stage reads: calibration and quantization are one walk."""

    calibrate: Calibrate | None
    quantize: Quantize
    task: Task
    compress: Compress = Compress()


class Validation(Section):
    """What the validate stage reads: the gates, and the target they are judged on."""

    validate_: Validate = Field(alias="validate")
    quantize: Quantize
    calibrate: Calibrate | None
    target: AnyTarget


class Packaging(Section):
    """What the package stage reads: the recipe as resolved goes into the manifest."""

    name: str
    recipe: Recipe
    package: Package


class Recipe(Section):
    """The whole YAML. `where` maps a path such as "targets.0.runtime" to "file:line"."""

    name: Name
    model: Model
    calibrate: Calibrate | None = None
    quantize: Quantize = Quantize()
    compress: Compress = Compress()
    targets: tuple[AnyTarget, ...] = Field(min_length=1)
    validate_: Validate = Field(alias="validate")
    package: Package = Package()

    @field_validator("validate_")
    @classmethod
    def _metric_suits_the_task(cls, section: Validate, info: ValidationInfo) -> Validate:
        if "model" in info.data:
            task = tasks.task(info.data["model"].task)
            check_metric(task, section)
            check_timing(task, section.latency)
        return section

    @field_validator("targets")
    @classmethod
    def _targets_differ(cls, targets: tuple[TargetSection, ...]) -> tuple[TargetSection, ...]:
        asides = {"on_fail": "refuse", "on_missing": "fail"}  # change nothing of what is built
        built = [target.model_copy(update=asides) for target in targets]
        for i, target in enumerate(built):
            if target in built[:i]:
                raise ValueError(
                    f"{i} builds the same as {built.index(target)}, so it would be judged twice; "
                    "remove it, or change what should differ"
                )
        return targets

    @model_validator(mode="after")
    def _sections_suit_the_task(self) -> Recipe:
        generates = tasks.task(self.model.task).generates
        only = {
            "quantize": ("head", "embedding", "allocate"),
            "validate_": ("max_kl", "min_top1", "sequence_length"),
        }
        for section, fields in only.items():
            present = sorted(getattr(self, section).model_fields_set & set(fields))
            if present and not generates:
                raise ValueError(
                    f"{section.rstrip('_')}.{present[0]} belongs to task "
                    f"{', '.join(tasks.generating())}, and the task is {self.model.task}"
                )
        if self.calibrate is not None and self.calibrate.generated and not generates:
            others = ", ".join(tasks.generating())
            raise ValueError(f"calibrate.generated: only task {others} writes text")
        if generates and self.validate_.min_cosine is not None:
            raise ValueError("validate.min_cosine is for embeddings; use max_kl or min_top1")
        return self

    @model_validator(mode="after")
    def _calibration_when_needed(self) -> Recipe:
        if self.quantize.calibrated and self.calibrate is None:
            names = ", ".join(methods.calibrated())
            raise ValueError(
                "calibrate is missing, and static activations, bias_correction, allocate and "
                f"methods {names} need it; add calibrate: {{data: ...}}"
            )
        return self

    @property
    def compression(self) -> Compression:
        return Compression(
            calibrate=self.calibrate,
            quantize=self.quantize,
            task=self.model.task,
            compress=self.compress,
        )

    def validation(self, target: TargetSection) -> Validation:
        return Validation(
            validate=self.validate_, quantize=self.quantize, calibrate=self.calibrate, target=target
        )

    @property
    def packaging(self) -> Packaging:
        return Packaging(name=self.name, recipe=self, package=self.package)


Packaging.model_rebuild()


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe."""
    return Recipe.model_json_schema(by_alias=True)
