"""The recipe: its schema and its defaults, which are nowhere else.

Frozen pydantic models with strict types and no extra keys. `recipe_file.read` makes one from
YAML; `schema()` is the JSON schema for editors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

Task = Literal[
    "sentence-embedding", "text-classification", "token-classification", "feature-extraction"
]
Metric = Literal["accuracy", "f1", "spearman", "probe_accuracy", "retrieval", "cosine"]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]  # of a file or folder, never a path

# task -> metric -> the columns it needs, each way that will do. Classification has an arg max over
# labels, an embedding a cosine between texts; hidden states of a text have no fixed width, so
# only their distance to the float model's can be said.
METRICS: dict[Task, dict[Metric, tuple[tuple[str, ...], ...]]] = {
    "sentence-embedding": {
        "cosine": (),
        "probe_accuracy": (("label",),),
        "retrieval": (("text_pair",), ("label",)),
        "spearman": (("text_pair", "score"),),
    },
    "feature-extraction": {"cosine": ()},
    "text-classification": {
        "cosine": (),
        "accuracy": (("label",),),
        "f1": (("label",),),
        "spearman": (("score",),),
    },
    "token-classification": {"cosine": (), "accuracy": (("tags",),), "f1": (("tags",),)},
}


class Section(BaseModel):
    """One block of the recipe: immutable, strict types, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DataSpec(Section):
    """Which rows of which data set, so exactly that two machines read the same rows.

    Written inline in a recipe or in a file of its own (calibration/*.yaml).
    """

    source: str = Field(
        description="csv, json, parquet or text (then give files), a folder that `datasets` "
        "loads, or a hub id"
    )
    files: tuple[str, ...] = Field((), description="file names or globs, relative to this spec")
    name: str | None = Field(None, description="configuration name of a hub data set")
    revision: str | None = Field(
        None,
        description="commit, tag or branch of a hub data set; resolved to a commit once per run, "
        "and its newest when absent",
    )
    split: str = "train"
    columns: dict[str, str] = Field(
        default_factory=lambda: {"text": "text"},
        description="our field -> the data set's column; fields: text, text_pair, label, score, "
        "tags",
    )
    labels: tuple[str, ...] = Field((), description="label names in id order, when labels are ids")
    samples: int | None = Field(None, ge=1, description="take this many rows, drawn with `seed`")
    seed: int = 0
    licence: str = ""
    attribution: str = ""
    base: str = Field("", exclude=True, description="set by the loader: the folder of this spec")

    @field_validator("labels")
    @classmethod
    def _labels_differ(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(labels) if name in labels[:i]]
        if twice:
            raise ValueError(f"label {twice[0]!r} is named twice, so its id is not clear")
        return labels


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
    allow_pickle: bool = False
    trust_remote_code: bool = False


class Calibrate(Section):
    data: DataSpec
    samples: int = Field(256, ge=1)
    sequence_length: int = Field(128, ge=2, description="texts are cut to this many tokens")
    batch_size: int = Field(8, ge=1)
    seed: int = 0


class Weights(Section):
    bits: Literal[8, 4] = 8
    symmetric: bool = True
    granularity: Literal["tensor", "channel", "group"] = "channel"
    group_size: int | None = Field(None, ge=2)

    @model_validator(mode="after")
    def _group_size_belongs_to_group(self) -> Weights:
        if (self.granularity == "group") != (self.group_size is not None):
            raise ValueError(
                "group_size is required with granularity: group, and meaningless without it"
            )
        return self


class Activations(Section):
    bits: Literal[8] = 8
    granularity: Literal["tensor", "token"] = Field(
        "tensor", description="tensor: one static range per site. token: measured at run time"
    )
    symmetric: bool = Field(
        False, description="true: code 0 is the middle. false: both ends of the range are chosen"
    )
    range: Literal["minmax", "percentile", "entropy", "mse"] = Field(
        "minmax", description="how a static range is chosen"
    )
    percentile: float = Field(99.999, gt=50, le=100, description="what range: percentile covers")

    @model_validator(mode="after")
    def _static_options_need_static_ranges(self) -> Activations:
        given = self.model_fields_set & {"range", "percentile", "symmetric"}
        if self.granularity == "token" and given:
            raise ValueError(
                f"{', '.join(sorted(given))}: chooses static ranges; granularity: token has none"
            )
        if "percentile" in given and self.range != "percentile":
            raise ValueError(f"percentile is given but range is {self.range}")
        return self


class Quantize(Section):
    method: Literal["rtn", "smoothquant"] = Field(
        "rtn", description="the module in optimizer/compress/"
    )
    weights: Weights = Weights()
    activations: Activations | None = Field(
        None, description="absent: weight-only, activations stay float"
    )
    strength: float | Literal["search"] = Field(
        "search", description="smoothquant: alpha in [0, 1], or searched per layer"
    )
    fold_only: bool = Field(
        False,
        description="smoothquant: smooth only where the factors fold into the layer before; "
        "otherwise the others are multiplied at run time",
    )
    bias_correction: bool = False
    keep_float: tuple[str, ...] = Field(
        (), description="module name patterns (fnmatch); one that matches nothing is an error"
    )

    @model_validator(mode="after")
    def _smoothquant_needs_activations(self) -> Quantize:
        if self.method == "smoothquant" and self.activations is None:
            raise ValueError(
                "method smoothquant moves difficulty from activations to weights; it needs an "
                "activations block, or use method: rtn"
            )
        if isinstance(self.strength, float) and not 0 <= self.strength <= 1:
            raise ValueError(f"strength {self.strength} is outside 0..1")
        return self


Span = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


class Shapes(Section):
    """One optimization profile: [min, opt, max] of each dynamic axis."""

    batch: Span = (1, 8, 32)
    sequence: Span = (16, 128, 256)

    @model_validator(mode="after")
    def _ordered(self) -> Shapes:
        for axis in ("batch", "sequence"):
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


class Latency(Section):
    data: DataSpec | None = Field(None, description="texts to time; disjoint from the other data")
    batch: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    sequence: tuple[Annotated[int, Field(ge=2)], ...] = (128,)
    iterations: int = Field(
        40, ge=5, description="timed runs per cell of the batch x sequence grid"
    )
    p99_ms: float | None = Field(None, gt=0, description="gate on the first cell of the grid")
    must_beat_float: bool = True


class Validate(Section):
    data: DataSpec
    train: DataSpec | None = Field(None, description="probe_accuracy: the rows the probe is fit on")
    metric: Metric
    max_drop: float = Field(0.01, gt=0, lt=1, description="non-inferiority margin")
    confidence: float = Field(0.95, gt=0.5, lt=1)
    min_cosine: float | None = Field(None, gt=0, le=1, description="mean cosine to float, gated")
    quantization_budget: float = Field(
        0.2, gt=0, description="ledger: relative L2 that quantization may move the model's output"
    )
    batch_size: int = Field(8, ge=1)
    latency: Latency = Latency()


def _check_metric(task: Task, asked: Validate) -> None:
    """Raise ValueError when the metric has no meaning for the task, or its columns are missing."""
    known, metric = METRICS[task], asked.metric
    if metric not in known:
        raise ValueError(
            f"metric {metric} has no meaning for task {task}; accepted: {', '.join(known)}"
        )
    columns = asked.data.columns
    if known[metric] and not any(all(c in columns for c in way) for way in known[metric]):
        ways = " or ".join(" and ".join(way) for way in known[metric])
        raise ValueError(
            f"metric {metric} needs a column for {ways} in data.columns, which has "
            f"{', '.join(columns)}; add e.g. {known[metric][0][0]}: <column of the data set>"
        )
    if metric != "probe_accuracy":
        return
    if asked.train is None or "label" not in asked.train.columns:
        what = "a train block" if asked.train is None else "a column for label in train.columns"
        raise ValueError(f"metric probe_accuracy fits a classifier on train rows: it needs {what}")
    if asked.train.labels and asked.data.labels and asked.train.labels != asked.data.labels:
        raise ValueError(
            f"data.labels {list(asked.data.labels)} and train.labels {list(asked.train.labels)} "
            "differ, so an id means one thing to the probe and another where it is judged"
        )


class Package(Section):
    tar: bool = True
    version: Name = "1"
    licence: str = Field("", description="of the model; read from the checkpoint when empty")


class Compression(Section):
    """What the compress stage reads: calibration and quantization are one walk."""

    calibrate: Calibrate | None
    quantize: Quantize
    task: Task


class Export(Section):
    """What the export stage reads: targets with the same float part share one graph."""

    float: Literal["fp32", "fp16"] = "fp32"
    opset: Literal[21] = 21


class Validation(Section):
    """What the validate stage reads: the gates, and the target they are judged on."""

    validate_: Validate = Field(alias="validate")
    quantize: Quantize
    calibrate: Calibrate | None
    target: Target


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
    targets: tuple[Target, ...] = Field(min_length=1)
    validate_: Validate = Field(alias="validate")
    package: Package = Package()

    @field_validator("validate_")
    @classmethod
    def _metric_suits_the_task(cls, asked: Validate, info: ValidationInfo) -> Validate:
        if "model" in info.data:
            _check_metric(info.data["model"].task, asked)
        return asked

    @model_validator(mode="after")
    def _calibration_when_needed(self) -> Recipe:
        activations = self.quantize.activations
        needs = (
            self.quantize.bias_correction
            or self.quantize.method == "smoothquant"
            or (activations is not None and activations.granularity == "tensor")
        )
        if needs and self.calibrate is None:
            raise ValueError(
                "calibrate is missing, and static activations, smoothquant and bias_correction "
                "need it; add calibrate: {data: ...}"
            )
        return self

    @property
    def compression(self) -> Compression:
        return Compression(calibrate=self.calibrate, quantize=self.quantize, task=self.model.task)

    def validation(self, target: Target) -> Validation:
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
