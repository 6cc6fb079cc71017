"""Section `model`: the checkpoint and its task."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer, model_validator

from optimizer.foundation.sections.fields import PATH, Base, Inside, Length, Pattern
from optimizer.foundation.sections.section import Section
from optimizer.harness.tasks.embeddings import sentence_embedding
from optimizer.recipe.answers import (
    Detections,
    ImageInput,
    Share,
    SpanAnswers,
    ZeroShot,
    split_template,
)
from optimizer.recipe.data import DataSpec
from optimizer.recipe.stage_sections import Task

Reference = Annotated[
    str, Field(max_length=PATH, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$")
]
Pooling = Literal["mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")]


class HotAdapter(Section):
    """Recipe section on an adapter that requests can choose, and the texts that judge it."""

    source: Pattern = Field(description="folder or hub id of a LoRA adapter of peft")
    data: DataSpec | None = Field(
        None,
        description="texts that the adapter is for, on which its gates are judged; default: "
        "validate.data",
    )


def _or_source(schema: dict[str, Any]) -> None:
    """Extend the JSON schema of {name: section} so that a string, the source alone, is accepted for
    a section, as recipe/file.py does."""
    for pattern, section in schema["patternProperties"].items():
        schema["patternProperties"][pattern] = {"anyOf": [{"type": "string"}, section]}


class HotAdapters(Section):
    """Recipe section on adapters that stay apart from the compressed model, for requests to choose
    from."""

    keep: Literal["hot"]
    sources: dict[AdapterName, HotAdapter] = Field(
        min_length=1,
        max_length=16,
        description="{name in requests: folder or hub id, or a section with source and data} of "
        "LoRA adapters of peft",
        json_schema_extra=_or_source,
    )

    @model_validator(mode="after")
    def _names_of_files(self) -> HotAdapters:
        lowered = [name.lower() for name in self.sources]
        twice = [name for name in self.sources if lowered.count(name.lower()) > 1]
        if twice:
            raise ValueError(f"{' and '.join(twice)} would be one file on some systems; rename one")
        if files := [name for name in lowered if name.endswith(".safetensors")]:
            raise ValueError(
                f"{files[0]} ends as a file does; name the adapter without .safetensors"
            )
        return self


class Model(Section):
    """Recipe section `model`: the checkpoint to compress, and its task."""

    source: Pattern = Field(
        "",
        description="hub id | folder (a relative one starts at the recipe) | python-package:<name>"
        "; absent for a torch module",
    )
    module: Reference | None = Field(
        None,
        description="tensors, detector: function that builds a torch module, "
        '"package.file:build", from the recipe\'s folder; needs weights, example and trust_code',
    )
    weights: Pattern | None = Field(
        None,
        description="of module: safetensors file with its state_dict, from the recipe's folder",
    )
    example: Reference | None = Field(
        None,
        description='of module: function that gives example inputs, "package.file:example": a '
        "tensor, a tuple, or a dictionary by name, with rows as the first axis",
    )
    trust_code: bool = Field(
        False, description="of module: true lets its Python files run on this machine"
    )
    revision: Pattern | None = Field(
        None, description="a commit or tag; resolved to a commit and pinned"
    )
    subfolder: Inside | None = Field(None, description="the model's folder inside the source")
    adapters: Annotated[tuple[Pattern, ...], Field(max_length=16)] | HotAdapters | None = Field(
        None,
        description="adapters of peft (LoRA, DoRA, ...), folders or hub ids, merged in this order "
        "before anything else; default: an adapter that lies beside the weights; []: none; "
        "{keep: hot, sources: {NAME: FOLDER}}: LoRA adapters of a text-generation model, kept "
        "apart for requests to choose from",
    )
    model_type: Pattern | None = Field(
        None, description="architecture of a model whose config.json names none, such as bert"
    )
    ignore_tensors: tuple[Pattern, ...] = Field(
        (),
        max_length=100,
        description="tensors of the checkpoint that the task leaves out, such as another task's "
        'head: names or patterns like "qa_outputs.*"',
    )
    task: Task
    pooling: Pooling | Annotated[list[Pooling], Field(min_length=1)] | None = Field(
        None,
        description="sentence-embedding: one, or a list whose results are joined; "
        "image-feature-extraction: mean or cls; default: the checkpoint's, else mean",
    )
    normalize: bool | None = Field(
        None,
        description="sentence-embedding only: L2-normalize the embedding; default: the "
        "checkpoint's, else true",
    )
    max_length: Length | None = Field(
        None,
        description="longest sequence in tokens; default: the checkpoint's, and at most 384 for "
        "question-answering, which reads a longer context in windows",
    )
    thresholds: Share | dict[Pattern, Share] | None = Field(
        None,
        description="text-classification with several labels per text: least probability of a "
        "label in an answer, or {label: probability}; default: 0.5. Choose them on rows other "
        "than validate.data",
    )
    answers: SpanAnswers | None = Field(
        None, description="question-answering only: windows of a long context, and the answers"
    )
    aggregation: Literal["none", "simple", "first", "average", "max"] | None = Field(
        None,
        description="token-classification only: aggregation_strategy of transformers' pipeline, "
        "whose entities are then the answer; default: words, and entities of words",
    )
    zero_shot: ZeroShot | None = Field(
        None, description="zero-shot tasks only: labels, and the sentence about an input"
    )
    image: ImageInput | None = Field(
        None, description="detector only: preparation of an image; default: letterbox, 0 to 1"
    )
    detections: Detections | None = Field(
        None, description="detector only: labels, and boxes in the outputs of the file"
    )
    max_active_dims: int | None = Field(
        None,
        ge=1,
        le=1 << 24,
        description="sparse-embedding only: number of weights of an answer, the largest; default: "
        "the checkpoint's, else all above 0",
    )
    template: str | None = Field(
        None,
        max_length=20_000,
        description="text-ranking with a causal language model only: text that it reads, with "
        "{query} and {document} in place of the two; default: the chat template of a folder that "
        "CrossEncoder saved",
    )
    gguf_file: Pattern | None = Field(
        None, description="GGUF file in the source, de-quantized to float and used as the model"
    )
    onnx_file: Inside | None = Field(
        None, description="tensors, detector: ONNX file in the source, where it holds several"
    )
    outputs: tuple[Pattern, ...] = Field(
        (),
        max_length=100,
        description="tensors, detector: outputs of the file to keep, or tensors inside it, such as "
        "those before NMS; default: all outputs",
    )
    axes: dict[Pattern, Annotated[int, Field(ge=1, le=1 << 20)]] = Field(
        default_factory=dict,
        description="tensors, detector: sizes of dynamic axes other than the first, by the file's "
        'names, or by "input.index", such as "images.2"',
    )
    ranges: dict[Pattern, tuple[float, float]] = Field(
        default_factory=dict,
        description="tensors, detector: lowest and highest value of an input, for inputs that are "
        "drawn to compare the model with ONNX Runtime; default: normally distributed; for images "
        "those of pixels; for whole numbers the rows of the table that they look up, else 0 and 1",
    )
    allow_pickle: bool = False
    trust_remote_code: bool = False
    base: Base = ""

    @property
    def merged(self) -> tuple[str, ...] | None:
        """Adapters that the recipe merges into the model; None: an adapter beside the weights, if
        there is one."""
        return () if isinstance(self.adapters, HotAdapters) else self.adapters

    @property
    def hot(self) -> dict[str, str]:
        """{name: folder or hub id} of the adapters that the recipe keeps apart from the model."""
        return {name: one.source for name, one in self._kept_apart.items()}

    @property
    def adapter_data(self) -> dict[str, DataSpec | None]:
        """Evaluation data of each adapter that is not merged into the model, {name: data}; None for
        one that is judged by validate.data."""
        return {name: one.data for name, one in self._kept_apart.items()}

    @property
    def without_data(self) -> Model:
        """Section without the texts that judge adapters, which stage load does not read."""
        if not isinstance(self.adapters, HotAdapters):
            return self
        sources = {name: HotAdapter(source=source) for name, source in self.hot.items()}
        adapters = self.adapters.model_copy(update={"sources": sources})
        return self.model_copy(update={"adapters": adapters})

    @property
    def side_of_texts(self) -> Model | None:
        """Section of the text encoder that reads the labels of requests to a zero-shot classifier
        of images; None if requests bring no labels."""
        if self.zero_shot is None or not self.zero_shot.labels_of_requests:
            return None
        return self.of_texts

    @property
    def of_texts(self) -> Model:
        """Section of the text encoder of the same image-text model, with vectors of unit length."""
        other = {"task": sentence_embedding.TASK.name, "zero_shot": None, "normalize": True}
        return self.model_copy(update=other)

    @property
    def _kept_apart(self) -> dict[str, HotAdapter]:
        return self.adapters.sources if isinstance(self.adapters, HotAdapters) else {}

    @property
    def adapter_sources(self) -> tuple[str, ...]:
        """Folders and hub ids of all adapters in the recipe."""
        return (*(self.merged or ()), *self.hot.values())

    @model_serializer(mode="wrap")
    def _without_empty_source(self, serialize: Any) -> dict[str, Any]:
        """Leave out the source of a torch module, so that a printed recipe can be read again."""
        document: dict[str, Any] = serialize(self)
        return {k: v for k, v in document.items() if k != "source" or v}

    @field_validator("template")
    @classmethod
    def _has_both_places(cls, template: str | None) -> str | None:
        if template is not None:
            split_template(template)
        return template

    @model_validator(mode="after")
    def _one_model(self) -> Model:
        of_module = {"weights": self.weights, "example": self.example}
        if self.module is None:
            stray = [*(k for k, v in of_module.items() if v), *["trust_code"] * self.trust_code]
            if stray:
                raise ValueError(f"{stray[0]} is for a torch module; add module, or remove it")
            if not self.source:
                raise ValueError("source is missing; accepted: a hub id, or a folder")
            return self
        if self.source:
            raise ValueError("source and module are two models; remove one")
        missing = [key for key, value in of_module.items() if value is None]
        if missing:
            raise ValueError(f"module needs {' and '.join(missing)}")
        if not self.trust_code:
            raise ValueError(
                f"module {self.module} is Python code that would run on this machine; read it, "
                "then set trust_code: true"
            )
        return self
