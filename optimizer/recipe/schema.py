"""Recipe: the whole YAML as frozen pydantic models, and the rules that relate its sections.

`recipe.file.read` reads one from YAML; `build_json_schema` returns the JSON schema for editors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from optimizer.foundation.sections.fields import Name, Pattern, Version
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.recipe import answers, embeddings, search, serving
from optimizer.recipe.compression import composition, methods
from optimizer.recipe.compression import sparsity as sparse
from optimizer.recipe.compression.quantize import Activations, LayerRule, Quantize, Weights
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.embeddings import Embeddings, Texts
from optimizer.recipe.model import Model
from optimizer.recipe.recover import Qat
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.search import Search
from optimizer.recipe.serving import Serve, Slo
from optimizer.recipe.stage_sections import (
    Compress,
    Compression,
    FailedTarget,
    Latencies,
    QuantizationAware,
    Recovery,
    Reduction,
    Task,
    Validation,
    list_data_specs,
)
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.targets import (
    CompressedTensorsTarget,
    Export,
    OnnxRuntimeTarget,
    OnnxRuntimeWebTarget,
    OpenVinoTarget,
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
    "Calibrate",
    "Compress",
    "CompressedTensorsTarget",
    "Compression",
    "DataSpec",
    "Embeddings",
    "EvaluationSet",
    "Export",
    "Latencies",
    "Latency",
    "LayerRule",
    "Metric",
    "Model",
    "OnnxRuntimeTarget",
    "OnnxRuntimeWebTarget",
    "OpenVinoTarget",
    "QuantizationAware",
    "Quantize",
    "Recovery",
    "Reduce",
    "Reduction",
    "Search",
    "Section",
    "Serve",
    "Shapes",
    "Slo",
    "Sparsity",
    "TargetSection",
    "Task",
    "TensorRTTarget",
    "Validate",
    "Validation",
    "Weights",
    "list_data_specs",
]


class Package(Section):
    """Recipe section `package`: settings of the bundle."""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "formats": "targets: [{runtime: compressed-tensors}]",
        "float": "targets: [{runtime: compressed-tensors, float: ...}]",
    }

    tar: bool = True
    version: Version = "1"
    licence: str = Field("", description="licence of the model; default: the checkpoint's")


class Packaging(Section):
    """Section that the package stage reads.

    recipe: the recipe with all defaults, for the manifest
    left_out: targets that were dropped
    """

    name: str
    recipe: Recipe
    package: Package
    left_out: tuple[FailedTarget, ...] = ()


def _quantize(before: dict[str, Any]) -> Quantize:
    """Return the default of `quantize`: round-to-nearest or, with sparsity, no quantization.

    before: {key: value} of the fields validated earlier
    """
    if before.get("sparsity") is None:
        return Quantize()
    return Quantize(method=methods.UNROUNDED.name)


class Recipe(Section):
    """Whole recipe, as written in YAML."""

    name: Name
    model: Model
    calibrate: Calibrate | None = None
    reduce: Reduce | None = None
    sparsity: Sparsity | None = None
    quantize: Quantize = Field(default_factory=_quantize)
    compress: Compress = Compress()
    qat: Qat | None = None
    targets: tuple[AnyTarget, ...] = Field(min_length=1)
    validate_: Validate = Field(alias="validate")
    embeddings: Embeddings | None = None
    texts: Texts | None = None
    package: Package = Package()
    serve: Serve | None = None
    slo: Slo | None = None
    search: Search | None = None
    publish: tuple[Pattern, ...] = Field(
        (),
        max_length=16,
        description="addresses to publish to: oci://HOST/NAME[:TAG], s3://BUCKET/PREFIX[:TAG], "
        "...; default tag: package.version",
    )

    @field_validator("validate_")
    @classmethod
    def _metric_suits_the_task(cls, section: Validate, info: ValidationInfo) -> Validate:
        if "model" in info.data:
            task = tasks.find_task(info.data["model"].task)
            check_metric(task, section)
            check_timing(task, section.latency)
        return section

    @field_validator("quantize")
    @classmethod
    def _methods_compose(cls, section: Quantize) -> Quantize:
        composition.check(section)
        return section

    @field_validator("targets")
    @classmethod
    def _targets_differ(cls, targets: tuple[TargetSection, ...]) -> tuple[TargetSection, ...]:
        asides = {"on_fail": "refuse", "on_missing": "fail"}  # neither affects the engine
        built = [target.model_copy(update=asides) for target in targets]
        for i, target in enumerate(built):
            if target in built[:i]:
                raise ValueError(
                    f"target {i} equals target {built.index(target)}; remove it, or change the "
                    "option that should differ"
                )
        return targets

    @model_validator(mode="after")
    def _sections_suit_the_task(self) -> Recipe:
        generates = tasks.find_task(self.model.task).generates
        specs = self.data_specs
        composition.check_of_files(self.model)
        composition.check_inputs(self.model.task, specs)
        composition.check_of_texts(
            self.model.task,
            {
                "model.max_length": self.model.max_length,
                "model.gguf_file": self.model.gguf_file,
                "reduce": self.reduce,
                "qat": self.qat,
            },
        )
        only = {
            "quantize": ("head", "embedding", "allocate"),
            "validate_": ("max_kl", "min_top1", "sequence_length"),
        }
        for section, fields in only.items():
            present = sorted(getattr(self, section).model_fields_set & set(fields))
            if present and not generates:
                raise ValueError(
                    f"{section.rstrip('_')}.{present[0]} belongs to task "
                    f"{', '.join(tasks.list_generating())}, and the task is {self.model.task}"
                )
        for method in self.quantize.of_kind("model-tuning") if not generates else ():
            raise ValueError(
                f"quantize.methods: {method.name} learns from the next tokens of a head over the "
                f"vocabulary, so it belongs to task {', '.join(tasks.list_generating())}; the task "
                f"is {self.model.task}"
            )
        if self.calibrate is not None and self.calibrate.generated and not generates:
            others = ", ".join(tasks.list_generating())
            raise ValueError(f"calibrate.generated: only task {others} generates text; remove it")
        if self.embeddings is not None:
            embeddings.check(self.embeddings, tasks.find_task(self.model.task), self.calibrate)
        if generates and self.validate_.min_cosine is not None:
            raise ValueError("validate.min_cosine is for embeddings; use max_kl or min_top1")
        if tasks.find_task(self.model.task).fills and self.validate_.min_cosine is not None:
            raise ValueError("validate.min_cosine is for embeddings; use metric agreement")
        return self

    @model_validator(mode="after")
    def _answers_suit_the_task(self) -> Recipe:
        names = ("answers", "aggregation", "zero_shot", "max_active_dims", "template")
        present = [name for name in names if getattr(self.model, name) is not None]
        others = [name for name in ("reduce", "qat", "slo") if getattr(self, name) is not None]
        answers.check(tasks.find_task(self.model.task), present, others)
        answers.check_zero_shot(tasks.find_task(self.model.task), self.model.zero_shot)
        return self

    @model_validator(mode="after")
    def _texts_suit_the_task(self) -> Recipe:
        embeddings.check_texts(self.texts, tasks.find_task(self.model.task), self.model.normalize)
        try:
            _ = self.side_of_texts
        except ValidationError as e:
            problem = e.errors()[0]
            place = ".".join(map(str, ("texts", *problem["loc"])))
            message = problem["msg"].removeprefix("Value error, ")
            raise ValueError(f"{place}: {message}") from None
        return self

    @model_validator(mode="after")
    def _serving_suits_the_task(self) -> Recipe:
        sections = {"serve": self.serve, "slo": self.slo}
        serving.check(tasks.find_task(self.model.task), self.targets, sections)
        if (
            self.slo is not None
            and self.slo.data is not None
            and "text" not in self.slo.data.columns
        ):
            raise ValueError(
                "slo.data: has no text column; remove slo.data to send images of noise"
            )
        return self

    @model_validator(mode="after")
    def _calibration_when_needed(self) -> Recipe:
        if self.reduce and self.reduce.calibrated and not (self.reduce.calibrate or self.calibrate):
            raise ValueError(
                "calibrate is missing, and reduce needs calibration data to choose what to keep; "
                "add calibrate: {data: ...} or reduce.calibrate, or use importance: magnitude "
                "without depth"
            )
        if self.reduce and self.reduce.student and not self.reduce.recover:
            raise ValueError(
                "reduce.recover is missing, and a student learns from the reference only there; "
                "add recover: {data: ...}"
            )
        if self.reduce and self.reduce.recover and self._recovery_data is None:
            raise ValueError(
                "reduce.recover has no text to learn from; add reduce.recover.data (texts without "
                "labels suffice), or calibrate: {data: ...}"
            )
        if self.sparsity is not None and self.sparsity.record.calibrated and not self.calibrate:
            raise ValueError(
                f"calibrate is missing, and sparsity.method {self.sparsity.method} needs "
                "activations; add calibrate: {data: ...}, or use method: magnitude"
            )
        if self.qat:
            composition.check_training(self.quantize)
        for learning, data in (
            (self.reduce.recover if self.reduce else None, self._recovery_data),
            (self.qat, self._training_data),
        ):
            if learning and data:
                composition.check_labels(learning, data, self.model.task)
                composition.check_generated(learning, self.model.task)
        if self.qat and self._training_data is None:
            raise ValueError(
                "qat has no text to learn from; add qat.data (texts without labels suffice), or "
                "calibrate: {data: ...}"
            )
        if self.quantize.calibrated and self.calibrate is None:
            names = ", ".join(methods.list_calibrated())
            raise ValueError(
                "calibrate is missing, and static activations, bias_correction, allocate, "
                f"keep_float_auto and methods {names} need it; add calibrate: {{data: ...}}"
            )
        return self

    @model_validator(mode="after")
    def _deterministic_everywhere(self) -> Recipe:
        if self.compress.deterministic:
            composition.check_deterministic(self.reduce, self.qat)
        return self

    @model_validator(mode="after")
    def _pruning_and_rounding_compose(self) -> Recipe:
        if self.sparsity is not None:
            sparse.check(self.sparsity, self.quantize)
        elif self.quantize.leaves_float:
            raise ValueError(
                f"quantize.method {methods.UNROUNDED.name} without a sparsity section would "
                "compress nothing; add sparsity, or use another method"
            )
        return self

    @model_validator(mode="after")
    def _search_suits_the_recipe(self) -> Recipe:
        if self.search is not None and self.texts is not None:
            raise ValueError(
                "search tries variants of one model, and the recipe has two; search each by "
                "itself, with task image-feature-extraction and sentence-embedding, or remove "
                "search"
            )
        if self.search is not None:
            others = [n for n in ("qat", "sparsity") if getattr(self, n) is not None]
            search.check(self.search, self.reduce, others, slo=self.slo is not None)
        return self

    @property
    def side_of_texts(self) -> Recipe | None:
        """Recipe of the text encoder of an image-text model; None without section `texts`. Raises
        ValidationError where that recipe is refused."""
        if self.texts is None:
            return None
        return Recipe(
            name=f"{self.name}-texts",
            model=self.model.of_texts,
            calibrate=self.texts.calibrate,
            quantize=self.texts.quantize,
            compress=self.compress,
            targets=(self.texts.target,),
            validate=self.texts.validate_,
            package=self.package.model_copy(update={"tar": False}),
        )

    @property
    def reduction(self) -> Reduction | None:
        """Section of the reduce stage; None without `reduce`."""
        if self.reduce is None:
            return None
        chosen = self.reduce.calibrate or self.calibrate
        return Reduction(
            reduce=self.reduce.model_copy(update={"recover": None}),  # a separate step
            calibrate=chosen if self.reduce.calibrated else None,
            task=self.model.task,
            compress=self.compress,
        )

    @property
    def latencies(self) -> Latencies | None:
        """Section of the latencies stage; None without goal.latency_gain. Options that choose units
        are removed, because they do not affect latency."""
        chosen = self.reduce
        if chosen is None or chosen.latency_gain is None:
            return None
        return Latencies(
            reduce=Reduce(
                goal=chosen.goal,
                methods=chosen.methods,
                multiple_of=chosen.multiple_of,
                gain_over=chosen.gain_over,
                gain_tolerance=chosen.gain_tolerance,
            ),
            compression=composition.cheapen(self.compression),
            target=self.targets[chosen.measure_on].without_on_fail,
            latency=self.validate_.latency,
        )

    @property
    def recovery(self) -> Recovery | None:
        """Section of the recover stage; None without reduce.recover."""
        recover = self.reduce.recover if self.reduce else None
        data = self._recovery_data
        if recover is None or data is None:
            return None
        return Recovery(recover=recover, data=data, task=self.model.task)

    @property
    def _recovery_data(self) -> DataSpec | None:
        reduce = self.reduce
        if reduce is None or reduce.recover is None:
            return None
        calibrate = reduce.calibrate or self.calibrate
        return reduce.recover.data or (calibrate.data if calibrate else None)

    @property
    def training(self) -> QuantizationAware | None:
        """Section of the qat stage; None without qat."""
        data = self._training_data
        if self.qat is None or data is None:
            return None
        return QuantizationAware(qat=self.qat, data=data, task=self.model.task)

    @property
    def _training_data(self) -> DataSpec | None:
        own = self.qat.data if self.qat else None
        return own or (self.calibrate.data if self.calibrate else None)

    @property
    def compression(self) -> Compression:
        """Section of the compress stage."""
        return Compression(
            calibrate=self.calibrate,
            quantize=self.quantize,
            task=self.model.task,
            compress=self.compress,
            sparsity=self.sparsity,
        )

    def validation(self, target: TargetSection) -> Validation:
        """Return the section of the validate stage for one target."""
        texts = self.side_of_texts
        return Validation(
            validate=self.validate_,
            quantize=self.quantize,
            calibrate=self.calibrate,
            reduce=self.reduce,
            recovery=self.recovery,
            training=self.training,
            target=target,
            sparsity=self.sparsity,
            embeddings=self.embeddings,
            adapters=self.model.adapter_data,
            texts=None if texts is None else texts.validation(texts.targets[0]),
        )

    @property
    def data_specs(self) -> dict[str, DataSpec]:
        """{path in the recipe: data set} of every data set."""
        others = (self.reduce, self.qat, self.slo, self.embeddings, self.model.adapter_data)
        return list_data_specs(self.calibrate, self.validate_, *others)

    @property
    def packaging(self) -> Packaging:
        """Section of the package stage."""
        return Packaging(name=self.name, recipe=self.bundled, package=self.package)

    @property
    def bundled(self) -> Recipe:
        """Recipe as a bundle records it: without `publish`, `slo` and `search`, which do not affect
        its files."""
        return self.model_copy(update={"publish": (), "slo": None, "search": None})


Packaging.model_rebuild()


def build_json_schema() -> dict[str, Any]:
    """Return the JSON schema of a recipe."""
    return Recipe.model_json_schema(by_alias=True)
