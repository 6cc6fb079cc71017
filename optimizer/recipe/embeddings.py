"""Sections `embeddings` (quantized or shorter vectors that a bundle can return, and the search test
that gates them) and `texts` (the text encoder of a bundle that embeds images and texts)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from optimizer.foundation.sections.section import Section
from optimizer.harness.embedding_settings import LARGEST, TYPES
from optimizer.harness.tasks import Task
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.targets import OnnxRuntimeTarget
from optimizer.recipe.validate import Validate

Type = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Margin = Annotated[float, Field(gt=0, lt=1)]
MARGIN = 0.02
Dimensions = Annotated[int, Field(ge=1, le=LARGEST)]


class Embeddings(Section):
    """Recipe section on quantized or shorter vectors of a sentence embedding.

    Each type at each number of dimensions is gated: documents are searched with the float model's
    vectors and with these, and recall and nDCG are compared query by query.
    """

    type: Type | Annotated[tuple[Type, ...], Field(min_length=1)] = Field(
        description="one or several of sentence-transformers' precisions; float32 to gate "
        "shortened float vectors. The ranges of int8 and uint8 are those of the texts of "
        "calibrate.data"
    )
    dimensions: tuple[Dimensions, ...] = Field(
        (), description="numbers of a vector, the first of the model's; default: all of them"
    )
    queries: DataSpec = Field(
        description="queries; with text_pair a row per query and relevant document, with score as "
        "its relevance; without, the documents that the float model finds are the relevant ones"
    )
    documents: DataSpec = Field(description="documents that are searched")
    k: int = Field(10, ge=1, le=1000, description="documents that a search returns, of recall@k")
    oversampling: int = Field(
        4,
        ge=1,
        le=100,
        description="the search by stored vectors fetches oversampling x k documents; the float "
        "query and the de-quantized documents rerank them, and the best k are judged. 1: no "
        "reranking",
    )
    max_drop: Margin | dict[str, Margin] = Field(
        MARGIN,
        description="non-inferiority margin of recall@k and of nDCG@10, or {form: margin} with "
        f"forms such as int8 or binary.128; forms that are not named: {MARGIN}",
    )

    @field_validator("type", "dimensions")
    @classmethod
    def _values_differ(cls, values: object) -> object:
        if isinstance(values, tuple) and len(set(values)) < len(values):
            raise ValueError(f"{list(values)} lists a value twice; list it once")
        return values

    @model_validator(mode="after")
    def _margins_are_of_forms(self) -> Embeddings:
        sizes = [f".{size}" for size in self.dimensions]
        forms = [f"{name}{size}" for name in self.types for size in ("", *sizes)]
        for form in self.max_drop if isinstance(self.max_drop, dict) else ():
            if form not in forms:
                raise ValueError(f"max_drop: {form!r} is not one of {', '.join(forms)}")
        return self

    def margin(self, name: str, size: int) -> float:
        """Return the recipe's max_drop that applies to a type at a number of dimensions."""
        if not isinstance(self.max_drop, dict):
            return self.max_drop
        return self.max_drop.get(f"{name}.{size}", self.max_drop.get(name, MARGIN))

    @property
    def types(self) -> tuple[str, ...]:
        """The recipe's chosen types, as a tuple also where it names one."""
        return (self.type,) if isinstance(self.type, str) else tuple(self.type)

    @property
    def ranged(self) -> bool:
        """True where a type in the recipe needs the value range of each dimension, measured on the
        texts of calibrate.data."""
        return any(TYPES[name].ranged for name in self.types)


class Texts(Section):
    """Recipe section on the text encoder of an image-text model whose image encoder is the recipe's
    model. It is compressed, judged and packaged like a model of its own, into folder `texts` of the
    bundle."""

    calibrate: Calibrate | None = None
    quantize: Quantize = Quantize()
    target: AnyTarget = Field(
        OnnxRuntimeTarget(runtime="onnxruntime"), description="runtime that reads texts"
    )
    validate_: Validate = Field(alias="validate")


def check_texts(section: Texts | None, task: Task, normalize: bool | None) -> None:
    """Refuse a recipe: raise ValueError where the section `texts` is missing for its task, or given
    for another.

    normalize: value of model.normalize
    """
    if task.reads_texts and normalize is False:
        raise ValueError(
            f"model.normalize is false, and vectors of task {task.name} are of unit length; "
            "remove it"
        )
    if task.reads_texts and section is None:
        raise ValueError(
            f"texts is missing, and task {task.name} reads texts beside images; add texts: "
            "{validate: {data: ..., metric: cosine}}"
        )
    if section is not None and not task.reads_texts:
        raise ValueError(
            f"texts is for task image-text-embedding, and the task is {task.name}; remove it, or "
            "set model.task"
        )


def check(section: Embeddings, task: Task, calibrate: Calibrate | None) -> None:
    """Refuse a recipe: raise ValueError where the task gives no sentence embeddings, and where int8
    or uint8 vectors have no calibration texts for their ranges."""
    if "embedding" not in task.optional or task.weighs:
        raise ValueError(
            f"embeddings is for task sentence-embedding, and the task is {task.name}; remove it, "
            "or set model.task"
        )
    if section.ranged and calibrate is None:
        raise ValueError(
            "calibrate is missing, and the ranges of embeddings.type int8 and uint8 are those of "
            "its texts; add calibrate: {data: ...}"
        )
