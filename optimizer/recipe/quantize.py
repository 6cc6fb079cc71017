"""The quantize section of a recipe: which methods, in which order, on which modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from optimizer.recipe import methods as table
from optimizer.recipe.data import Section

Method = Literal[
    "rtn", "smoothquant", "awq", "rotation", "gptq", "autoround", "scale_tuning", "pass_through"
]
TRANSFORMS: tuple[Method, ...] = ("rotation", "smoothquant", "awq")
"""Change the float weights and keep the function; any of them, in this order."""
ROUNDERS: tuple[Method, ...] = ("rtn", "gptq", "autoround", "scale_tuning")
"""Choose the codes; rtn when none is named. autoround starts from the codes of gptq before it, and
scale_tuning tunes the scales of whatever codes there are."""
CALIBRATED: tuple[Method, ...] = ("smoothquant", "awq", "gptq", "autoround", "scale_tuning")


class Weights(Section):
    bits: Literal[8, 4, 3] = 8
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


class LayerRule(Section):
    """An exception for some modules. The first rule that matches a module decides."""

    modules: tuple[str, ...] = Field(
        min_length=1, description="module name patterns (fnmatch); each must match something"
    )
    weights: Weights


_BY_SENSITIVITY = (
    *(Weights(bits=4, granularity="group", group_size=g) for g in (16, 32, 64, 128, 256)),
    Weights(bits=8, granularity="channel"),
)


class Allocate(Section):
    """optimizer/compress/apply/mixed_precision.py; holds the whole model in memory once. Modules
    that a rule in `layers` names are left out of it."""

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
        description="bits per weight, scales (of 16 bits) included; absent: no file becomes larger "
        "than with quantize.weights everywhere",
    )
    share_choice: bool = Field(
        False,
        description="one choice for modules that read the same tensor, so that query, key and "
        "value stay one product at run time",
    )
    windows: int = Field(8, ge=1, description="calibration windows to measure on")
    seed: int = 0

    @model_validator(mode="after")
    def _choices_are_stored_in_their_bits(self) -> Allocate:
        for i, choice in enumerate(self.choices):
            if choice.bits == 3:
                raise ValueError(
                    f"choices.{i}: 3 bits are stored as 4 in the state and in ONNX, so they would "
                    "cost accuracy and save nothing; a rule in quantize.layers takes them"
                )
        return self


class Gptq(Section):
    """optimizer/compress/methods/gptq.py"""

    RENAMED: ClassVar[Mapping[str, str]] = {
        "asymmetric": "float_target",
        "widest": "max_scale_ratio",
    }

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
    max_scale_ratio: float = Field(
        2.0,
        gt=1,
        description="no scale is more than so many times what covers its weights, nor so many "
        "times less",
    )


class Awq(Section):
    """optimizer/compress/methods/awq.py"""

    clip: bool = Field(True, description="search for the range of each group after scaling")


class Rotation(Section):
    """optimizer/compress/methods/rotation.py"""

    residual: bool = Field(True, description="rotate the residual stream; unties a tied head")
    values: bool = Field(True, description="rotate each head's values, undone in the projection")
    seed: int = 0


class Autoround(Section):
    """optimizer/compress/methods/autoround.py"""

    steps: int = Field(200, ge=1, description="sign-gradient steps per block, a batch each")
    seed: int = 0


class ScaleTuning(Section):
    """optimizer/compress/methods/scale_tuning.py; holds the whole model in memory"""

    RENAMED: ClassVar[Mapping[str, str]] = {"together": "batch_size"}

    epochs: int = Field(2, ge=1, description="times through the calibration windows")
    batch_size: int = Field(2, ge=1, description="windows per step")
    held_out: int = Field(3, ge=1, description="windows that only judge")
    generated: int = Field(
        0,
        ge=0,
        description="windows of the model's own text that only scale_tuning learns from, besides "
        "those of calibrate.generated",
    )
    seed: int = 0


MethodName = Annotated[Method, BeforeValidator(table.refuse_old_name)]


class Quantize(Section):
    RENAMED: ClassVar[Mapping[str, str]] = table.RENAMED

    method: MethodName | None = Field(
        None,
        description="one module in optimizer/compress/apply/; rtn when neither is given. "
        "pass_through: the codes of a checkpoint that is quantized already",
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
    head: Weights | Literal["float"] = Field(
        "float", description="text-generation: how the output head (lm_head) is stored"
    )
    embedding: Weights | Literal["float"] = Field(
        "float", description="text-generation: how the token embedding is stored"
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
    gptq: Gptq = Gptq()
    awq: Awq = Awq()
    rotation: Rotation = Rotation()
    autoround: Autoround = Autoround()
    scale_tuning: ScaleTuning = ScaleTuning()
    keep_float: tuple[str, ...] = Field(
        (), description="module name patterns (fnmatch); one that matches nothing is an error"
    )

    @property
    def transforms(self) -> tuple[Method, ...]:
        return tuple(m for m in self._asked if m in TRANSFORMS)

    @property
    def rounders(self) -> tuple[Method, ...]:
        """At least one, in order: each starts from the codes of the one before."""
        return tuple(m for m in self._asked if m in ROUNDERS) or ("rtn",)

    @property
    def kept(self) -> bool:
        """Whether the checkpoint's own codes are taken as they are."""
        return "pass_through" in self._asked

    @property
    def calibrated(self) -> bool:
        """Whether anything here looks at activations."""
        static = self.activations is not None and self.activations.granularity == "tensor"
        looks = static or self.bias_correction or self.allocate is not None
        return looks or any(m in CALIBRATED for m in self._asked)

    @property
    def float_target(self) -> bool:
        """Whether gptq makes up for earlier errors. (Measured on SmolLM2, static W8A8: 0.029 nats
        without, 0.03 to 0.16 with it, changing with the last digit of a sum.)"""
        static = self.activations is not None and self.activations.granularity == "tensor"
        return not static if self.gptq.float_target is None else self.gptq.float_target

    @property
    def _asked(self) -> tuple[Method, ...]:
        return self.methods or ((self.method,) if self.method else ())

    @model_validator(mode="after")
    def _methods_compose(self) -> Quantize:
        if self.method and self.methods:
            raise ValueError("method and methods are both given; use one of them")
        if self.kept and (len(self._asked) > 1 or self.model_fields_set - {"method", "methods"}):
            raise ValueError(
                "pass_through takes the checkpoint's own codes; nothing else can be asked for"
            )
        order: tuple[Method, ...] = (*TRANSFORMS, *ROUNDERS, "pass_through")
        places = [order.index(m) for m in self._asked]
        if places != sorted(set(places)):
            raise ValueError(
                f"methods {list(self._asked)}: each once, and in this order: {', '.join(order)}"
            )
        if {"rtn", "gptq"} <= set(self._asked) or {"rtn", "autoround"} <= set(self._asked):
            raise ValueError(
                "rtn chooses the codes by itself; leave it out beside "
                f"{', '.join(m for m in self.rounders if m != 'rtn')}"
            )
        if {"rotation", "awq"} <= set(self._asked) and {"autoround", "scale_tuning"} & set(
            self._asked
        ):
            raise ValueError(
                "rotation and awq both fold into the norms' gains, and autoround and scale_tuning "
                "learn them: the proof could not tell one from the other; leave rotation or awq out"
            )
        if {"autoround", "scale_tuning"} <= set(self._asked):
            raise ValueError(
                "autoround and scale_tuning both tune the norms' gains; use one of them"
            )
        if "smoothquant" in self._asked and self.activations is None:
            raise ValueError(
                "method smoothquant moves difficulty from activations to weights; it needs an "
                "activations block, or use method: rtn"
            )
        learned = {"autoround", "scale_tuning"} & set(self._asked)
        if learned and self.activations is not None:
            raise ValueError(
                f"method {min(learned)} learns for float inputs; use gptq with activations"
            )
        if self.allocate is not None and self.activations is not None:
            raise ValueError("allocate weighs errors of weights only; leave activations out")
        if self.allocate and "gptq" in self._asked and self.allocate.average_bits is None:
            raise ValueError(
                "allocate spends the bytes of uniform weights by what rounding to nearest costs; "
                "with gptq uniform weights are better (measured: 0.083 against 0.088 nats). Leave "
                "one of them out, or give allocate.average_bits"
            )
        if isinstance(self.strength, float) and not 0 <= self.strength <= 1:
            raise ValueError(f"strength {self.strength} is outside 0..1")
        for name in ("gptq", "awq", "rotation", "autoround", "scale_tuning"):
            if name in self.model_fields_set and name not in self._asked:
                raise ValueError(f"{name}: options are given, and methods does not name {name}")
        return self
