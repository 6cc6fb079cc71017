"""The quantize section of a recipe: which methods, in which order, on which modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from optimizer.foundation.sections.fields import LONG, MANY, Limit, Pattern, Seed
from optimizer.foundation.sections.method_options import (
    AutoroundOptions,
    AwqOptions,
    GptqOptions,
    ModelTuningOptions,
    RotationOptions,
    ScaleTuningOptions,
)
from optimizer.foundation.sections.section import Section
from optimizer.recipe.compression import methods
from optimizer.recipe.compression.methods import Kind, Method


class Weights(Section):
    bits: Literal[8, 4, 3] = 8
    symmetric: bool = True
    granularity: Literal["tensor", "channel", "group"] = "channel"
    group_size: int | None = Field(None, ge=2, le=LONG)
    full_range: bool = Field(
        False,
        description="integers -8..7 and scales of either sign, which target gguf takes: finer than "
        "-7..7 at the same size",
    )

    @model_validator(mode="after")
    def _full_range_belongs_to_symmetric_4_bits(self) -> Weights:
        if self.full_range and (self.bits != 4 or not self.symmetric):
            raise ValueError("full_range is for bits: 4 with symmetric: true")
        return self

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
        "tensor", description="tensor: one static range per module. token: measured at run time"
    )
    symmetric: bool = Field(
        False, description="true: code 0 is the middle. false: both ends of the range are chosen"
    )
    range: Literal["minmax", "percentile", "entropy", "mse"] = Field(
        "minmax", description="how a static range is chosen"
    )
    percentile: float = Field(99.999, gt=50, le=100, description="what range: percentile covers")
    attention: Literal["float", "int8"] = Field(
        "float",
        description="the two products of an encoder's attention, queries by keys and probabilities "
        "by values: int8: of integers too, which target openvino multiplies",
    )

    @model_validator(mode="after")
    def _static_options_need_static_ranges(self) -> Activations:
        static = self.model_fields_set & {"range", "percentile", "symmetric"}
        if self.granularity == "token" and static:
            raise ValueError(
                f"{', '.join(sorted(static))}: chooses static ranges; granularity: token has none"
            )
        if self.granularity == "token" and self.attention == "int8":
            raise ValueError("attention: int8 needs static ranges; use granularity: tensor")
        if "percentile" in static and self.range != "percentile":
            raise ValueError(f"percentile is given but range is {self.range}")
        return self


class LayerRule(Section):
    """An exception for some modules. The first rule that matches a module decides."""

    modules: tuple[Pattern, ...] = Field(
        min_length=1, description="module name patterns (fnmatch); each must match something"
    )
    weights: Weights


_BY_SENSITIVITY = (
    *(Weights(bits=4, granularity="group", group_size=g) for g in (16, 32, 64, 128, 256)),
    Weights(bits=8, granularity="channel"),
)


class Allocate(Section):
    """optimizer/compress/apply/precision/mixed_precision.py; holds the whole model in memory once.
    Modules that a rule in `layers` names are left out of it."""

    RENAMED: ClassVar[Mapping[str, str]] = {"together": "share_choice"}

    choices: tuple[Weights, ...] = Field(
        _BY_SENSITIVITY,
        min_length=1,
        description="what a module may get beside quantize.weights; group sizes that do not divide "
        "its inputs are passed over",
    )
    average_bits: float | None = Field(
        None,
        gt=0,
        le=32,
        description="bits per weight, scales (of 16 bits) included; absent: no file becomes larger "
        "than with quantize.weights everywhere",
    )
    share_choice: bool = Field(
        False,
        description="one choice for modules that read the same tensor, so that query, key and "
        "value stay one product at run time",
    )
    windows: int = Field(8, ge=1, le=MANY, description="calibration windows to measure on")
    seed: Seed = 0

    @model_validator(mode="after")
    def _choices_are_stored_in_their_bits(self) -> Allocate:
        for i, choice in enumerate(self.choices):
            if choice.bits == 3:
                raise ValueError(
                    f"choices.{i}: 3 bits are stored as 4 in the state and in ONNX, so they would "
                    "cost accuracy and save nothing; a rule in quantize.layers takes them"
                )
        return self


class KeepFloatAuto(Section):
    """optimizer/compress/apply/precision/keep_float_auto.py; holds the whole model in memory
    once."""

    max_error: Limit = Field(
        gt=0,
        le=100,
        description="how far quantization may move the model's output (relative L2): the modules "
        "that move it most stay float until it is met, measured together",
    )
    max_share: Limit = Field(
        0.5, ge=0, lt=1, description="of the weights; where more would stay float, it is refused"
    )
    samples: int = Field(16, ge=1, le=MANY, description="calibration inputs to measure on")


def _known(name: str) -> str:
    try:
        methods.method(name)
    except KeyError:
        names = [repr(known) for known in methods.names()]
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        ) from None
    return name


MethodName = Annotated[
    str,
    BeforeValidator(methods.refuse_old_name),
    AfterValidator(_known),
    WithJsonSchema({"anyOf": [{"enum": list(methods.METHODS)}, {"type": "string"}]}),
]


class Quantize(Section):
    """Options of a method of another distribution (recipe/compression/methods.py) stand under its
    name, like those of ours."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})
    RENAMED: ClassVar[Mapping[str, str]] = methods.RENAMED

    method: MethodName | None = Field(
        None,
        description="one module in optimizer/compress/apply/; rtn when neither is given. "
        "pass_through: the codes of a checkpoint that is quantized already; float_weights: none, "
        "the default beside sparsity where quantize is absent",
    )
    methods: tuple[MethodName, ...] = Field(
        (), description="several of them, composed in order, e.g. [awq, gptq]"
    )
    weights: Weights = Weights()
    activations: Activations | None = Field(
        None, description="absent: weight-only, activations stay float"
    )
    layers: tuple[LayerRule, ...] = Field((), description="other weights for some modules")
    allocate: Allocate | None = Field(
        None,
        description="text-generation: weights per module, by what their errors do to the answer",
    )
    head: Weights | Literal["float", "tied"] = Field(
        "float",
        description="text-generation: how the output head (lm_head) is stored. tied: as the "
        "embedding's integers, which a GGUF file then holds once",
    )
    embedding: Weights | Literal["float"] = Field(
        "float", description="text-generation: how the token embedding is stored"
    )
    strength: float | Literal["search"] = Field(
        "search", description="smoothquant: alpha in [0, 1], or searched per layer"
    )
    fold_only: bool | tuple[Pattern, ...] = Field(
        False,
        description="smoothquant: true: smooth only where the factors fold into the layer before; "
        "false: the others are multiplied at run time; patterns: but for the inputs of these "
        "modules, which saves that time for what it costs in accuracy",
    )
    bias_correction: bool = False
    gptq: GptqOptions = GptqOptions()
    awq: AwqOptions = AwqOptions()
    rotation: RotationOptions = RotationOptions()
    autoround: AutoroundOptions = AutoroundOptions()
    scale_tuning: ScaleTuningOptions = ScaleTuningOptions()
    keep_float: tuple[Pattern, ...] = Field(
        (), description="module name patterns (fnmatch); one that matches nothing is an error"
    )
    keep_float_auto: KeepFloatAuto | None = Field(
        None, description="which other modules stay float, by what quantizing each costs"
    )

    @property
    def chosen(self) -> tuple[Method, ...]:
        """The records of the methods that the recipe names, in order."""
        names = self.methods or ((self.method,) if self.method else ())
        return tuple(map(methods.method, names))

    def of_kind(self, *kinds: Kind) -> tuple[Method, ...]:
        """Those of some kinds."""
        return tuple(m for m in self.chosen if m.kind in kinds)

    @property
    def rounding(self) -> Method:
        """What chooses the integers: rounding to nearest where nothing else is named."""
        return next(iter(self.of_kind("rounding")), methods.NEAREST)

    @property
    def block_rounding(self) -> Method:
        """What chooses those of the blocks, where a method before may search their ranges."""
        searches = [s for m in self.chosen if (s := m.range_search(self.options_of(m)))]
        return searches[-1] if searches and self.rounding is methods.NEAREST else self.rounding

    @property
    def in_use(self) -> tuple[Method, ...]:
        """Every method whose code has a part in the result; an embedding is always rounded to
        nearest."""
        return (*self.chosen, self.block_rounding, methods.NEAREST)

    @property
    def passes_through(self) -> bool:
        """Whether the checkpoint's own integers are taken as they are."""
        return bool(self.of_kind("pass-through"))

    @property
    def leaves_float(self) -> bool:
        """Whether nothing is rounded."""
        return bool(self.of_kind("float"))

    @property
    def head_weights(self) -> Weights | Literal["float"]:
        """How the head is stored: as the embedding where it is tied to it."""
        return self.embedding if self.head == "tied" else self.head

    @property
    def static_activations(self) -> bool:
        """Whether activations are quantized with ranges chosen beforehand."""
        return self.activations is not None and self.activations.granularity == "tensor"

    @property
    def integer_attention(self) -> bool:
        """Whether attentions multiply integers."""
        return self.activations is not None and self.activations.attention == "int8"

    @property
    def calibrated(self) -> bool:
        """Whether anything here looks at activations."""
        looks = self.static_activations or self.bias_correction or self.allocate is not None
        looks = looks or self.keep_float_auto is not None
        return looks or any(m.calibrated for m in self.chosen)

    @property
    def float_reference(self) -> bool:
        """Whether a method compares with the float model's hidden states at the same place."""
        return any(self.aims_at_float(m) for m in self.chosen)

    @property
    def model_tuning(self) -> ModelTuningOptions | None:
        """The options of the method that tunes the whole model after the walk, if there is one."""
        tuning = self.of_kind("model-tuning")
        return self.options_of(tuning[0]) if tuning else None

    def options_of(self, method: Method) -> Any:
        """The section of a method's options; None for a method without options."""
        return getattr(self, method.name, None)

    def aims_at_float(self, method: Method) -> bool:
        """Whether a method compares with the float model's hidden states at the same place."""
        return method.float_reference(self.options_of(method), self.static_activations)

    @model_validator(mode="after")
    def _methods_compose(self) -> Quantize:
        self._read_options_of_others()
        if self.head == "tied" and self.embedding == "float":
            raise ValueError("head: tied takes the embedding's integers; say embedding as well")
        if isinstance(self.strength, float) and not 0 <= self.strength <= 1:
            raise ValueError(f"strength {self.strength} is outside 0..1")
        return self

    def _read_options_of_others(self) -> None:
        """Keys that are no field must be methods of other distributions, with their options."""
        assert self.__pydantic_extra__ is not None  # extra="allow"
        sections: dict[str, Any] = self.__pydantic_extra__
        options = {m.name: m.options for m in self.chosen if m.options is not None}
        for name in sections.keys() - options.keys():
            unknown: InitErrorDetails = {
                "type": "extra_forbidden",
                "loc": (name,),
                "input": sections[name],
            }
            raise ValidationError.from_exception_data("Quantize", [unknown])
        for name in options.keys() - type(self).model_fields.keys():
            value = sections.get(name, {})
            if not isinstance(value, options[name]):
                sections[name] = _section(options[name], name, value)


def _section(options: type[Section], name: str, value: Any) -> Section:
    """The options of a method, whose errors are placed below its name."""
    try:
        return options.model_validate_json(json.dumps(value))
    except ValidationError as e:
        errors: list[Any] = [{**error, "loc": (name, *error["loc"])} for error in e.errors()]
        raise ValidationError.from_exception_data("Quantize", errors) from None
