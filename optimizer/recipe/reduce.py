"""Section `reduce`: target size of a checkpoint before compression, and the methods."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from optimizer.foundation.sections.fields import MANY, Base, Inside, Limit, Pattern, Seed
from optimizer.foundation.sections.section import Section
from optimizer.recipe.data import Calibrate
from optimizer.recipe.recover import Recover

Method = Literal["width", "ffn", "heads", "depth", "hidden"]
Importance = Literal["magnitude", "activations", "fisher", "second_order"]


class Goal(Section):
    """Recipe section `reduce.goal`, the size of the reduced model: exactly one of these keys."""

    keep: float | None = Field(
        None, gt=0, le=1, description="maximum share of the weights in the blocks to keep"
    )
    parameters: float | None = Field(
        None, ge=1, description="maximum parameters of the model, embeddings included"
    )
    depth: Annotated[int, Field(ge=1, le=MANY)] | None = Field(None, description="number of blocks")
    latency_gain: float | None = Field(
        None,
        gt=1,
        le=1000,
        description="speedup of the target reduce.measure_on when made from the smaller "
        "checkpoint, over reduce.gain_over; timed on this machine, on the first cell of "
        "validate.latency",
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> Goal:
        present = [n for n in type(self).model_fields if getattr(self, n) is not None]
        if len(present) != 1:
            raise ValueError(
                f"{' and '.join(present) or 'nothing'} was found; accepted: exactly one of keep, "
                "parameters, depth, latency_gain"
            )
        return self


class Student(Section):
    """Recipe section on a smaller model with the reference's vocabulary. One without weights gets
    transformers' initial weights."""

    source: Pattern = Field(
        description="hub id | folder | python-package:<name>; a folder needs only config.json"
    )
    revision: Pattern | None = Field(
        None, description="a commit or tag; resolved to a commit and pinned"
    )
    subfolder: Inside | None = Field(None, description="the model's folder inside the source")
    seed: Seed = Field(0, description="seed of the initialisation, where it has no weights")
    base: Base = ""


def _named(value: Any) -> Any:
    """Turn a name in a recipe into a section with that source; return other values unchanged."""
    return {"source": value} if isinstance(value, str) else value


AnyStudent = Annotated[
    Student | None, BeforeValidator(_named, json_schema_input_type=Student | str | None)
]


class Reduce(Section):
    """Recipe section on a smaller checkpoint made before quantization: pruned from the reference to
    a goal, or a student model that learns from it."""

    goal: Goal | None = Field(None, description="size to prune to; alternatively give a student")
    student: AnyStudent = Field(
        None,
        description="smaller model that learns from the reference, instead of a goal; its name, or "
        "a section",
    )
    methods: tuple[Method, ...] = Field(
        (),
        description="ffn: neurons of the feed-forward layers; heads: key/value heads with the "
        "query heads that read them, where the config can express fewer; width: ffn and heads; "
        "depth: blocks; hidden: channels of the hidden states, alone, where the config can "
        "express fewer. Default: width, or depth for goal.depth",
    )
    measure_on: int = Field(
        0, ge=0, le=MANY, description="goal.latency_gain: index in targets of the one timed"
    )
    gain_over: Literal["same_form", "float"] = Field(
        "same_form",
        description="goal.latency_gain: baseline of the speedup: the unreduced model with the same "
        "quantization, or in float (fp32) on the same runtime, so that the gain of quantization "
        "counts too",
    )
    gain_tolerance: Limit = Field(
        0.05,
        gt=0,
        lt=1,
        description="goal.latency_gain: share by which the final speedup may fall short; sizes are "
        "integers, and timings of one model vary",
    )
    importance: Importance = Field(
        "second_order",
        description="criterion for neurons and heads; channels use activations or magnitude",
    )
    depth_importance: Literal["measured", "influence"] = Field(
        "measured",
        description="criterion for blocks: divergence of the outputs without the block, or the "
        "change that a block makes to its input (ShortGPT)",
    )
    depth_samples: int = Field(
        32,
        ge=1,
        le=MANY,
        description="number of texts for choosing blocks, spread over those of calibrate",
    )
    multiple_of: int = Field(
        8,
        ge=1,
        le=1024,
        description="divisor of the numbers of neurons or channels: kernels process this many at "
        "once, and a remainder costs as much as a full step",
    )
    calibrate: Calibrate | None = Field(
        None, description="data for the criterion; default: the recipe's calibrate"
    )
    recover: Recover | None = Field(
        None, description="training of the smaller model on the reference's outputs"
    )

    @field_validator("methods")
    @classmethod
    def _methods_differ(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        covered = {"width": ("ffn", "heads")}
        for i, method in enumerate(methods):
            others = methods[:i] + methods[i + 1 :]
            if method in others or any(method in covered.get(o, ()) for o in others):
                raise ValueError(f"{method} is listed twice (width is ffn and heads); list it once")
        return methods

    @model_validator(mode="after")
    def _a_goal_or_a_student(self) -> Reduce:
        if (self.goal is None) == (self.student is None):
            number = "neither" if self.goal is None else "both"
            raise ValueError(f"{number} was found; accepted: either goal or student")
        if self.student is None:
            return self
        cutting = sorted(self.model_fields_set - {"student", "recover", "goal"})
        if cutting:
            raise ValueError(
                f"{', '.join(cutting)}: belongs to a goal, and this section has a student, from "
                "which nothing is pruned; remove it, or give a goal instead of student"
            )
        return self

    @model_validator(mode="after")
    def _methods_suit_the_goal(self) -> Reduce:
        if self.goal is None:
            return self
        if self.goal.depth is not None and self.chosen != ("depth",):
            raise ValueError(
                f"goal.depth sets only the number of blocks, and methods has "
                f"{', '.join(self.methods)}; accepted: methods: [depth]; or give goal.keep, "
                "goal.parameters or goal.latency_gain"
            )
        if self.chosen == ("depth",) and "importance" in self.model_fields_set:
            raise ValueError(
                "importance applies to neurons and heads, and methods has only depth; remove "
                "it, or use depth_importance"
            )
        if "hidden" in self.chosen:
            self._channels_alone()
        for option in ("measure_on", "gain_over", "gain_tolerance"):
            if self.goal.latency_gain is None and option in self.model_fields_set:
                raise ValueError(
                    f"{option} applies to goal.latency_gain, which goal does not have; "
                    "remove it, or use goal: {latency_gain: ...}"
                )
        for option in ("depth_importance", "depth_samples"):
            if "depth" not in self.chosen and option in self.model_fields_set:
                raise ValueError(
                    f"{option} applies to method depth, and methods has {', '.join(self.chosen)}; "
                    "remove it, or add depth to methods"
                )
        return self

    def _channels_alone(self) -> None:
        if self.chosen != ("hidden",):
            raise ValueError(
                f"methods has {', '.join(self.methods)}; accepted: [hidden] alone, because the "
                "others need activations of the full width; apply them in a second reduction"
            )
        if self.latency_gain is not None:
            raise ValueError(
                "goal.latency_gain is for neurons, heads and blocks; with hidden give goal.keep "
                "or goal.parameters"
            )
        if self.importance not in ("magnitude", "activations") and (
            "importance" in self.model_fields_set
        ):
            raise ValueError(
                f"importance {self.importance} is for neurons and heads; "
                "accepted with hidden: activations, magnitude"
            )

    @property
    def chosen(self) -> tuple[Method, ...]:
        """Methods of the recipe's `reduce` or, by default, depth or width, as the goal implies;
        empty for a student."""
        if self.goal is None:
            return ()
        return self.methods or (("depth",) if self.goal.depth is not None else ("width",))

    @property
    def measure(self) -> Importance:
        """Recipe's importance criterion in use. Hidden channels support activations and magnitude
        only."""
        if self.chosen == ("hidden",) and self.importance != "magnitude":
            return "activations"
        return self.importance

    @property
    def latency_gain(self) -> float | None:
        """goal.latency_gain; None for a goal of another kind."""
        return None if self.goal is None else self.goal.latency_gain

    @property
    def least_gain(self) -> float | None:
        """Least speedup of the smaller model that the final timing must reach, by section reduce;
        None without goal.latency_gain."""
        gain = self.latency_gain
        return None if gain is None else gain * (1 - self.gain_tolerance)

    @property
    def calibrated(self) -> bool:
        """True where the recipe's importance of units or blocks is measured on calibration data."""
        if self.goal is None:
            return False
        by_weights = self.importance == "magnitude"
        return "depth" in self.chosen or not by_weights
