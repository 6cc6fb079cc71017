"""The quantize section of a recipe: methods, their order and options, and their modules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

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

if TYPE_CHECKING:
    from optimizer.foundation.state import Mode

FLOAT4_GROUP = 16  # weights of a scale in NVFP4


def _is_int(value: str) -> bool:
    return value == "int"


def _is_float(value: str) -> bool:
    return value == "float"


class Weights(Section):
    """Recipe section on quantized weights: type, bits and granularity."""

    type: Literal["int", "float8", "float4"] = Field(
        "int",
        description="float8: FP8 E4M3 values (8 bits, granularity: channel or block); float4: "
        "NVFP4, E2M1 values in groups of 16; both for target compressed-tensors and method rtn",
        exclude_if=_is_int,  # keys of steps without it stay
    )
    bits: Literal[8, 4, 3] = 8
    symmetric: bool = True
    granularity: Literal["tensor", "channel", "group", "block"] = Field(
        "channel", description="block: a scale for each 128 x 128 values, with type: float8"
    )
    group_size: int | None = Field(None, ge=2, le=LONG)
    full_range: bool = Field(
        False,
        description="integers -8..7 and scales of either sign, for target gguf: finer than -7..7 "
        "at the same size",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in_float4(cls, values: Any) -> Any:
        """Fill in the recipe's bits and groups of NVFP4, which exist in one size only."""
        if isinstance(values, Mapping) and values.get("type") == "float4":
            return {"bits": 4, "granularity": "group", "group_size": FLOAT4_GROUP, **values}
        return values

    @model_validator(mode="after")
    def _float8_has_one_layout(self) -> Weights:
        layout = self.bits, self.symmetric, self.granularity, self.group_size
        if self.type == "float4" and layout != (4, True, "group", FLOAT4_GROUP):
            raise ValueError(
                f"type: float4 is for bits: 4, symmetric: true, granularity: group, group_size: "
                f"{FLOAT4_GROUP}; leave these out, or use type: int"
            )
        one = self.bits == 8 and self.symmetric and self.granularity in ("channel", "block")
        if self.is_float8 and not one:
            raise ValueError(
                "type: float8 is for bits: 8, symmetric: true, granularity: channel or block; "
                "correct these, or use type: int"
            )
        if self.granularity == "block" and not self.is_float8:
            raise ValueError("granularity: block is for type: float8; use channel or group")
        return self

    @property
    def is_float8(self) -> bool:
        """True where the recipe asks for weights that are E4M3 values."""
        return self.type == "float8"

    @property
    def is_float(self) -> bool:
        """True where the recipe asks for weights that are values of a small float type."""
        return self.type != "int"

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
    """Recipe section on the quantization of the inputs of linear layers and convolutions, and of
    attention."""

    type: Literal["int", "float8", "float4"] = Field(
        "int",
        description="float8: FP8 E4M3 values, with weights of type: float8; float4: NVFP4, with "
        "weights of type: float4",
        exclude_if=_is_int,
    )
    bits: Literal[8, 4] = 8
    granularity: Literal["tensor", "token", "group"] = Field(
        "tensor",
        description="tensor: one static range per module; token: measured at run time; group: "
        "measured at run time for each 128 values of a token, with weights of granularity: block; "
        "with type: float4 for each 16 values, over one static number per module",
    )
    symmetric: bool = Field(
        False,
        description="true: range symmetric around 0; false: both ends of the range are chosen",
    )
    range: Literal["minmax", "percentile", "entropy", "mse"] = Field(
        "minmax", description="method that chooses a static range"
    )
    percentile: float = Field(
        99.999, gt=50, le=100, description="percentile that range: percentile covers"
    )
    attention: Literal["float", "int8"] = Field(
        "float",
        description="the two products of an encoder's attention, queries by keys and probabilities "
        "by values; int8: quantized too, for target openvino",
    )

    @property
    def mode(self) -> Mode:
        """Name in a compressed state of the quantization that the recipe asks for."""
        return cast(
            "Mode", self.granularity if _is_int(self.type) else f"{self.type} {self.granularity}"
        )

    @property
    def is_symmetric(self) -> bool:
        """True where the recipe's static ranges are symmetric around 0, as those of FP8 and FP4
        always are."""
        return self.symmetric or not _is_int(self.type)

    @property
    def is_static(self) -> bool:
        """True where the recipe asks for a calibrated range of each module."""
        return self.granularity == "tensor" or self.type == "float4"

    @model_validator(mode="before")
    @classmethod
    def _fill_in_float4(cls, values: Any) -> Any:
        """Fill in the recipe's bits and groups of NVFP4, which exist in one size only."""
        if isinstance(values, Mapping) and values.get("type") == "float4":
            return {"bits": 4, "granularity": "group", **values}
        return values

    @model_validator(mode="after")
    def _static_options_need_static_ranges(self) -> Activations:
        of_float4 = self.type == "float4"
        if (self.bits == 4) != of_float4 or (of_float4 and self.granularity != "group"):
            raise ValueError(
                f"type: {self.type} with bits: {self.bits} and granularity: {self.granularity}; "
                "type: float4 is for bits: 4, granularity: group, the others for bits: 8"
            )
        if self.granularity == "group" and _is_int(self.type):
            raise ValueError("granularity: group is for type: float8; use tensor or token")
        if not _is_int(self.type) and self.range in ("entropy", "mse"):
            raise ValueError(
                f"range: {self.range} chooses the step of integers; with type: {self.type} use "
                "minmax or percentile"
            )
        static = self.model_fields_set & {"range", "percentile", "symmetric"}
        if not self.is_static and static:
            raise ValueError(
                f"{', '.join(sorted(static))}: for static ranges; granularity: "
                f"{self.granularity} has none"
            )
        if self.mode != "tensor" and self.attention == "int8":
            raise ValueError("attention: int8 needs static ranges; use granularity: tensor")
        if "percentile" in static and self.range != "percentile":
            raise ValueError(f"percentile is given but range is {self.range}")
        return self


class LayerRule(Section):
    """Recipe's rule with different weights for some modules. The first rule that matches a module
    applies."""

    modules: tuple[Pattern, ...] = Field(
        min_length=1, description="module name patterns (fnmatch); each must match something"
    )
    weights: Weights


_BY_SENSITIVITY = (
    *(Weights(bits=4, granularity="group", group_size=g) for g in (16, 32, 64, 128, 256)),
    Weights(bits=8, granularity="channel"),
)


class Allocate(Section):
    """Choice of bits per module by sensitivity
    (optimizer/compress/apply/precision/mixed_precision.py).

    The whole model is in memory once. Modules that a rule in `layers` names are excluded.
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"together": "share_choice"}

    choices: tuple[Weights, ...] = Field(
        _BY_SENSITIVITY,
        min_length=1,
        description="alternatives to quantize.weights; group sizes that do not divide a module's "
        "inputs are skipped",
    )
    average_bits: float | None = Field(
        None,
        gt=0,
        le=32,
        description="bits per weight, including scales (16 bits each); absent: no file becomes "
        "larger than with quantize.weights everywhere",
    )
    share_choice: bool = Field(
        False,
        description="same choice for modules that read the same tensor, so that query, key and "
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
    """Choice of modules that stay float by measured error
    (optimizer/compress/apply/precision/keep_float_auto.py). The whole model is in memory once."""

    max_error: Limit = Field(
        gt=0,
        le=100,
        description="largest change of the model's output by quantization (relative L2): the "
        "modules that change it most stay float until this is met by all others together",
    )
    max_share: Limit = Field(
        0.5,
        ge=0,
        lt=1,
        description="largest share of the weights that may stay float, else an error",
    )
    samples: int = Field(16, ge=1, le=MANY, description="calibration inputs to measure on")


def _check_method(name: str) -> str:
    try:
        methods.find_method(name)
    except KeyError:
        names = [repr(m) for m in methods.list_names()]
        expected = f"{', '.join(names[:-1])} or {names[-1]}"
        raise PydanticCustomError(
            "literal_error", "Input should be {expected}", {"expected": expected}
        ) from None
    return name


MethodName = Annotated[
    str,
    BeforeValidator(methods.refuse_old_name),
    AfterValidator(_check_method),
    WithJsonSchema({"anyOf": [{"enum": list(methods.METHODS)}, {"type": "string"}]}),
]


class Quantize(Section):
    """Quantization: methods, formats, and modules that stay float. Options of a method from another
    distribution (recipe/compression/methods.py) stand under the method's name, as for built-in
    methods."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})
    RENAMED: ClassVar[Mapping[str, str]] = methods.RENAMED

    method: MethodName | None = Field(
        None,
        description="one module in optimizer/compress/apply/; rtn when neither is given. "
        "pass_through: the integers of a quantized checkpoint; float_weights: no quantization, "
        "the default with sparsity where quantize is absent",
    )
    methods: tuple[MethodName, ...] = Field(
        (), description="several methods, in order, e.g. [awq, gptq]"
    )
    weights: Weights = Weights()
    activations: Activations | None = Field(
        None, description="absent: weight-only, activations stay float"
    )
    layers: tuple[LayerRule, ...] = Field((), description="other weights for some modules")
    allocate: Allocate | None = Field(
        None,
        description="text-generation: bits per module, by the effect of their errors on the logits",
    )
    head: Weights | Literal["float", "tied"] = Field(
        "float",
        description="text-generation: storage of the output head (lm_head). tied: the "
        "embedding's integers, which a GGUF file then holds once",
    )
    embedding: Weights | Literal["float"] = Field(
        "float", description="text-generation: storage of the token embedding"
    )
    kv_cache: Literal["float", "float8"] = Field(
        "float",
        description="text-generation: float8: keys and values in the KV cache as FP8 E4M3, with a "
        "calibrated scale each per layer, for target compressed-tensors",
        exclude_if=_is_float,  # keys of steps without it stay
    )
    strength: float | Literal["search"] = Field(
        "search", description="smoothquant: alpha in [0, 1], or searched per layer"
    )
    fold_only: bool | tuple[Pattern, ...] = Field(
        False,
        description="smoothquant: true: smooth only where the factors fold into the layer before; "
        "false: multiply the others at run time; patterns: multiply at run time except for the "
        "inputs of these modules, which trades accuracy for time",
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
        None, description="other modules that stay float, by the error of quantizing each"
    )

    @property
    def chosen(self) -> tuple[Method, ...]:
        """Records of the recipe's methods, in order."""
        names = self.methods or ((self.method,) if self.method else ())
        return tuple(map(methods.find_method, names))

    def of_kind(self, *kinds: Kind) -> tuple[Method, ...]:
        """Return the records of the recipe's methods of these kinds, in order."""
        return tuple(m for m in self.chosen if m.kind in kinds)

    @property
    def rounding(self) -> Method:
        """The recipe's method that chooses the integers; by default rounding to nearest."""
        return next(iter(self.of_kind("rounding")), methods.NEAREST)

    @property
    def block_rounding(self) -> Method:
        """Method that rounds the weights of blocks: `rounding`, or the range search that a
        smoothing method brings in place of rounding to nearest."""
        searches = [s for m in self.chosen if (s := m.range_search(self.options_of(m)))]
        return searches[-1] if searches and self.rounding is methods.NEAREST else self.rounding

    @property
    def in_use(self) -> tuple[Method, ...]:
        """All methods whose code affects what this recipe makes. NEAREST is always among them,
        because it rounds embeddings."""
        return (*self.chosen, self.block_rounding, methods.NEAREST)

    @property
    def passes_through(self) -> bool:
        """True where the recipe keeps the checkpoint's own integers."""
        return bool(self.of_kind("pass-through"))

    @property
    def leaves_float(self) -> bool:
        """True where the recipe quantizes no weight."""
        return bool(self.of_kind("float"))

    @property
    def head_weights(self) -> Weights | Literal["float"]:
        """Recipe's format of the quantized output head; with head: tied that of the embedding."""
        return self.embedding if self.head == "tied" else self.head

    @property
    def every_weights(self) -> dict[str, Weights]:
        """{path below quantize: section} of all sections that describe quantized weights."""
        blocks: dict[str, Any] = {"weights": self.weights}
        blocks |= {f"layers.{i}.weights": rule.weights for i, rule in enumerate(self.layers)}
        choices = self.allocate.choices if self.allocate else ()
        blocks |= {f"allocate.choices.{i}": w for i, w in enumerate(choices)}
        blocks |= {"head": self.head_weights, "embedding": self.embedding}
        return {place: w for place, w in blocks.items() if isinstance(w, Weights)}

    @property
    def is_float(self) -> bool:
        """True where the recipe quantizes a weight or an activation to a small float type."""
        inputs = self.activations is not None and not _is_int(self.activations.type)
        return inputs or any(w.is_float for w in self.every_weights.values())

    @property
    def static_activations(self) -> bool:
        """True where the recipe quantizes activations with static ranges."""
        return self.activations is not None and self.activations.is_static

    @property
    def integer_attention(self) -> bool:
        """True where the recipe quantizes products of attention."""
        return self.activations is not None and self.activations.attention == "int8"

    @property
    def calibrated(self) -> bool:
        """True where a method or an option of the recipe needs calibration data."""
        looks = self.static_activations or self.bias_correction or self.allocate is not None
        looks = looks or self.keep_float_auto is not None or self.kv_cache == "float8"
        return looks or any(m.calibrated for m in self.chosen)

    @property
    def float_reference(self) -> bool:
        """True where a method of the recipe compares with the float model's hidden states at the
        same place."""
        return any(self.aims_at_float(m) for m in self.chosen)

    @property
    def model_tuning(self) -> ModelTuningOptions | None:
        """Options in the recipe of the method that tunes the whole model; None without such a
        method."""
        tuning = self.of_kind("model-tuning")
        return self.options_of(tuning[0]) if tuning else None

    def options_of(self, method: Method) -> Any:
        """Return the recipe's section with the options of `method`; None for a method without
        options."""
        return getattr(self, method.name, None)

    def aims_at_float(self, method: Method) -> bool:
        """Return True where `method`, with the recipe's options, compares with the float model's
        hidden states at the same place."""
        return method.float_reference(self.options_of(method), self.static_activations)

    @model_validator(mode="after")
    def _methods_compose(self) -> Quantize:
        self._read_options_of_others()
        if self.head == "tied" and self.embedding == "float":
            raise ValueError("head: tied takes the embedding's integers; set embedding as well")
        if isinstance(self.strength, float) and not 0 <= self.strength <= 1:
            raise ValueError(f"strength {self.strength} is outside 0..1")
        return self

    def _read_options_of_others(self) -> None:
        """Read unknown keys as options of other distributions' methods."""
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
    """Build the options of a method from another distribution; errors name the place below its
    key."""
    try:
        return options.model_validate_json(json.dumps(value))
    except ValidationError as e:
        errors: list[Any] = [{**error, "loc": (name, *error["loc"])} for error in e.errors()]
        raise ValidationError.from_exception_data("Quantize", errors) from None
