"""The `reduce` section: how small a checkpoint is made before it is compressed, and by what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from optimizer.foundation.sections.fields import MANY, Inside, Limit, Pattern, Seed
from optimizer.foundation.sections.section import Section
from optimizer.recipe.data import Calibrate
from optimizer.recipe.recover import Recover

Method = Literal["width", "ffn", "heads", "depth", "hidden"]
Importance = Literal["magnitude", "activations", "fisher", "second_order"]


class Goal(Section):
    """How small; exactly one of these."""

    keep: float | None = Field(
        None, gt=0, le=1, description="share of the weights in the blocks that is kept, at most"
    )
    parameters: float | None = Field(
        None, ge=1, description="of the whole model, embeddings included, at most"
    )
    depth: Annotated[int, Field(ge=1, le=MANY)] | None = Field(None, description="this many blocks")
    latency_gain: float | None = Field(
        None,
        gt=1,
        le=1000,
        description="how many times as fast what reduce.measure_on runs is, made of the smaller "
        "checkpoint, as the whole one (reduce.gain_over); timed on this machine, on the first cell "
        "of validate.latency",
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
    """A smaller model with the reference's vocabulary; without weights it is initialised."""

    source: Pattern = Field(
        description="hub id | folder | python-package:<name>; of a folder config.json suffices"
    )
    revision: Pattern | None = Field(
        None, description="a commit or tag; resolved to a commit and pinned"
    )
    subfolder: Inside | None = Field(None, description="the model's folder inside the source")
    seed: Seed = Field(0, description="of the initialisation, where it has no weights")


def _named(value: Any) -> Any:
    """A name alone is a source."""
    return {"source": value} if isinstance(value, str) else value


AnyStudent = Annotated[
    Student | None, BeforeValidator(_named, json_schema_input_type=Student | str | None)
]


class Reduce(Section):
    """A smaller checkpoint before anything is quantized: cut out of the reference by a goal, or a
    student of its own that learns from it."""

    goal: Goal | None = Field(None, description="how much is cut; or give a student")
    student: AnyStudent = Field(
        None,
        description="a smaller model that learns to answer as the reference does, in the place of "
        "a goal; its name, or a section",
    )
    methods: tuple[Method, ...] = Field(
        (),
        description="width: ffn, and heads where the architecture's config can carry fewer; ffn: "
        "neurons of the feed-forward layers; heads: key/value heads with the query heads that read "
        "them; depth: whole blocks; hidden: channels of the hidden states, by itself, where the "
        "config can carry fewer. When absent: width, or depth for goal.depth",
    )
    measure_on: int = Field(
        0, ge=0, le=MANY, description="goal.latency_gain: the place in targets of the one timed"
    )
    gain_over: Literal["same_form", "float"] = Field(
        "same_form",
        description="goal.latency_gain: beside what it is timed: the whole model in the same form "
        "(the same quantization), or in float on the same runtime (fp32, of TensorRT the "
        "target's float), so that what quantization gains counts too",
    )
    gain_tolerance: Limit = Field(
        0.05,
        gt=0,
        lt=1,
        description="goal.latency_gain: the share of the gain that what is measured at the end may "
        "lack; sizes are whole numbers, and the same model is timed differently each time",
    )
    importance: Importance = Field(
        "second_order",
        description="by what neurons and heads are chosen; channels by activations, or magnitude",
    )
    depth_importance: Literal["measured", "influence"] = Field(
        "measured",
        description="by what blocks are chosen: the divergence of the outputs measured when a "
        "block is left out, or how much a block changes its input (ShortGPT)",
    )
    depth_samples: int = Field(
        32,
        ge=1,
        le=MANY,
        description="texts that blocks are chosen by, spread over those of calibrate",
    )
    multiple_of: int = Field(
        8,
        ge=1,
        le=1024,
        description="numbers of neurons, or channels, are multiples of it: kernels read so many at "
        "a time, and compute a remainder as slowly as a whole step",
    )
    calibrate: Calibrate | None = Field(
        None, description="text to choose by; the recipe's own calibrate when absent"
    )
    recover: Recover | None = Field(
        None, description="the smaller model learns from the reference what it lost"
    )

    @field_validator("methods")
    @classmethod
    def _methods_differ(cls, methods: tuple[Method, ...]) -> tuple[Method, ...]:
        covered = {"width": ("ffn", "heads")}
        for i, method in enumerate(methods):
            others = methods[:i] + methods[i + 1 :]
            if method in others or any(method in covered.get(o, ()) for o in others):
                raise ValueError(f"{method} is named twice (width is ffn and heads); name it once")
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
                f"{', '.join(cutting)}: nothing is cut out of the reference beside a student; "
                "leave it out, or give a goal in the place of student"
            )
        return self

    @model_validator(mode="after")
    def _methods_suit_the_goal(self) -> Reduce:
        if self.goal is None:
            return self
        if self.goal.depth is not None and self.chosen != ("depth",):
            raise ValueError(
                f"goal.depth says the number of blocks, and methods has {', '.join(self.methods)}; "
                "accepted: methods: [depth]; or give goal.keep, goal.parameters or "
                "goal.latency_gain for both"
            )
        if self.chosen == ("depth",) and "importance" in self.model_fields_set:
            raise ValueError(
                "importance chooses neurons and heads, and methods has only depth; remove it, or "
                "use depth_importance"
            )
        if "hidden" in self.chosen:
            self._channels_alone()
        for option in ("measure_on", "gain_over", "gain_tolerance"):
            if self.goal.latency_gain is None and option in self.model_fields_set:
                raise ValueError(
                    f"{option} is of a latency that is measured, and goal has no latency_gain; "
                    "remove it, or use goal: {latency_gain: ...}"
                )
        for option in ("depth_importance", "depth_samples"):
            if "depth" not in self.chosen and option in self.model_fields_set:
                raise ValueError(
                    f"{option} is of choosing blocks, and methods has {', '.join(self.chosen)}; "
                    "remove it, or add depth to methods"
                )
        return self

    def _channels_alone(self) -> None:
        if self.chosen != ("hidden",):
            raise ValueError(
                f"methods has {', '.join(self.methods)}; accepted: [hidden] alone, since others "
                "choose by what enters layers of the whole width; reduce what comes of it once more"
            )
        if self.latency_gain is not None:
            raise ValueError(
                "goal.latency_gain times numbers of neurons, heads and blocks; with hidden give "
                "goal.keep or goal.parameters"
            )
        if self.importance not in ("magnitude", "activations") and (
            "importance" in self.model_fields_set
        ):
            raise ValueError(
                f"importance {self.importance} adjusts the layers that read neurons and heads; "
                "accepted with hidden: activations, magnitude"
            )

    @property
    def chosen(self) -> tuple[Method, ...]:
        """The methods, as given or by the goal; none of a student."""
        if self.goal is None:
            return ()
        return self.methods or (("depth",) if self.goal.depth is not None else ("width",))

    @property
    def measure(self) -> Importance:
        """By what is chosen; of channels nothing is adjusted."""
        if self.chosen == ("hidden",) and self.importance != "magnitude":
            return "activations"
        return self.importance

    @property
    def latency_gain(self) -> float | None:
        """The goal, where it is one."""
        return None if self.goal is None else self.goal.latency_gain

    @property
    def least_gain(self) -> float | None:
        """What the latency gain measured at the end must reach; None without such a goal."""
        gain = self.latency_gain
        return None if gain is None else gain * (1 - self.gain_tolerance)

    @property
    def calibrated(self) -> bool:
        """Whether anything is chosen by what is computed from text."""
        if self.goal is None:
            return False
        by_weights = self.importance == "magnitude"
        return "depth" in self.chosen or not by_weights
