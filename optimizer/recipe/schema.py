"""The recipe: its schema and its defaults, which are nowhere else.

Frozen pydantic models with strict types and no extra keys. `recipe_file.read` makes one from
YAML; `schema()` is the JSON schema for editors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from optimizer.errors import closest
from optimizer.harness import tasks
from optimizer.recipe import methods
from optimizer.recipe.data import DataSpec, Section
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

__all__ = [
    "Activations",
    "CompressedTensorsTarget",
    "DataSpec",
    "Export",
    "LayerRule",
    "OnnxRuntimeTarget",
    "Quantize",
    "Section",
    "Shapes",
    "TargetSection",
    "TensorRTTarget",
    "Weights",
]

Metric = Literal[
    "accuracy", "f1", "spearman", "probe_accuracy", "retrieval", "cosine", "perplexity"
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]  # of a file or folder, never a path


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

    source: str = Field(description="hub id | folder | python-package:<name>")
    revision: str | None = Field(
        None, description="a commit or tag; resolved to a commit and pinned"
    )
    subfolder: str | None = Field(None, description="the model's folder inside the source")
    task: Task
    pooling: Literal["mean", "cls"] | None = Field(
        None, description="sentence-embedding only; read from the checkpoint when absent, else mean"
    )
    normalize: bool | None = Field(
        None,
        description="sentence-embedding only: L2-normalize the embedding; read from the checkpoint "
        "when absent, else true",
    )
    max_length: int | None = Field(
        None, ge=2, description="longest sequence in tokens; read from the checkpoint when absent"
    )
    gguf_file: str | None = Field(
        None, description="a GGUF file in the source, de-quantized to float and taken as the model"
    )
    allow_pickle: bool = False
    trust_remote_code: bool = False


class Calibrate(Section):
    data: DataSpec
    samples: int = Field(
        256, ge=1, description="texts; for text-generation windows of sequence_length tokens"
    )
    sequence_length: int = Field(
        128,
        ge=2,
        description="texts are cut to this many tokens; for "
        "text-generation they are joined and cut into windows of exactly as many",
    )
    batch_size: int = Field(8, ge=1)
    generated: int = Field(
        0,
        ge=0,
        description="text-generation: windows of the float model's own text beside the given ones; "
        "the whole model is in memory to write them",
    )
    seed: int = 0


class Latency(Section):
    data: DataSpec | None = Field(None, description="texts to time; disjoint from the other data")
    batch: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    sequence: tuple[Annotated[int, Field(ge=2)], ...] = (128,)
    iterations: int = Field(
        40,
        ge=5,
        description="timed runs per cell of the batch x sequence grid, at least: timing goes on "
        "until the speed gates are decided, or max_seconds are spent",
    )
    max_seconds: float = Field(
        300,
        ge=0,
        description="of timing one target, that no further runs are begun beyond; 0: `iterations` "
        "runs and no more",
    )
    new_tokens: int = Field(
        32, ge=2, description="text-generation: tokens generated after each prompt"
    )
    p99_ms: float | None = Field(
        None,
        gt=0,
        description="gate on the first cell of the grid; for text-generation per new token",
    )
    must_beat_float: bool = True


class EvaluationSet(Section):
    """Further rows to judge on: see validate/quality/evaluation.py."""

    data: DataSpec
    report_only: bool = Field(
        False, description="the difference on it is reported, and no gate follows from it"
    )


class Validate(Section):
    data: DataSpec
    also: dict[Name, EvaluationSet] = Field(
        default_factory=dict,
        description="further evaluation sets by name, judged like `data`, by the same metric and "
        "margin, each with gates of its own",
    )
    train: DataSpec | None = Field(None, description="probe_accuracy: the rows the probe is fit on")
    metric: Metric
    max_drop: float = Field(
        0.01,
        gt=0,
        lt=1,
        description="non-inferiority margin: of the metric, and for perplexity of the mean "
        "negative log-likelihood in nats per token",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1)
    min_cosine: float | None = Field(None, gt=0, le=1, description="mean cosine to float, gated")
    max_kl: float | None = Field(
        None, gt=0, description="text-generation: KL from float to candidate, nats per token, gated"
    )
    min_top1: float | None = Field(
        None, gt=0, le=1, description="text-generation: share of equal next tokens, gated"
    )
    sequence_length: int = Field(
        512, ge=2, description="text-generation: tokens per window of held-out text"
    )
    quantization_budget: float = Field(
        0.2, gt=0, description="ledger: relative L2 that quantization may move the model's output"
    )
    batch_size: int = Field(8, ge=1)
    latency: Latency = Latency()


def _check_metric(task: tasks.Task, section: Validate) -> None:
    """Raise ValueError when the metric has no meaning for the task, or its columns are missing."""
    known, metric = task.metrics, section.metric
    if metric not in known:
        raise ValueError(
            f"metric {metric} has no meaning for task {task.name}; accepted: {', '.join(known)}"
        )
    sets = {"data": section.data, **{f"also.{n}.data": s.data for n, s in section.also.items()}}
    for where, spec in sets.items():
        columns = spec.columns
        if known[metric] and not any(all(c in columns for c in way) for way in known[metric]):
            ways = " or ".join(" and ".join(way) for way in known[metric])
            raise ValueError(
                f"metric {metric} needs a column for {ways} in {where}.columns, which has "
                f"{', '.join(columns)}; add e.g. {known[metric][0][0]}: <column of the data set>"
            )
    if metric != "probe_accuracy":
        return
    if section.train is None or "label" not in section.train.columns:
        what = "a train block" if section.train is None else "a column for label in train.columns"
        raise ValueError(f"metric probe_accuracy fits a classifier on train rows: it needs {what}")
    for where, spec in sets.items():
        if section.train.labels and spec.labels and section.train.labels != spec.labels:
            raise ValueError(
                f"{where}.labels {list(spec.labels)} and train.labels {list(section.train.labels)} "
                "differ, so an id means one thing to the probe and another where it is judged"
            )


def _check_timing(task: tasks.Task, latency: Latency) -> None:
    """Raise ValueError when so few runs can decide a speed gate whatever they measure."""
    from optimizer.harness.bench import fewest  # here: a recipe without it is read faster

    if latency.max_seconds > 0:
        return
    steps = latency.new_tokens - 1 if task.generates else 1
    fewest_runs = {"must_beat_float": fewest(50) if latency.must_beat_float else 0}
    fewest_runs["p99_ms"] = 0 if latency.p99_ms is None else math.ceil(fewest(99) / steps)
    for gate, runs in fewest_runs.items():
        if latency.iterations < runs:
            raise ValueError(
                f"latency.iterations: {latency.iterations} with max_seconds: 0 can never decide "
                f"{gate}, which takes {runs} runs at least; set iterations: {runs} or more, or "
                "leave max_seconds out, so that timing goes on until it is decided"
            )


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
    version: Name = "1"
    licence: str = Field("", description="of the model; read from the checkpoint when empty")


class Compress(Section):
    """How the walk over the blocks is carried out."""

    memory_gb: float = Field(
        4.0, gt=0, description="activations kept in memory; what is beyond it goes to disk"
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
            _check_metric(task, section)
            _check_timing(task, section.latency)
        return section

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
