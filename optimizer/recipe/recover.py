"""How a model learns from the reference: the sections reduce.recover and qat of a recipe."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from optimizer.foundation.sections.fields import MANY, BatchSize, Length, Seed
from optimizer.foundation.sections.section import Section
from optimizer.harness.bounds import THREADS
from optimizer.recipe.data import DataSpec

Rate = Annotated[float, Field(gt=0, le=1)]


class LossWeights(Section):
    """optimizer/reduce/methods/losses.py. Each loss counts in units of its own value before the
    first step, so that equal weights mean equal pulls whatever the losses measure."""

    output: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="what the task is about: KL of the answers' probabilities, or the cosine of "
        "the vectors and of every pair of them",
    )
    hidden: float = Field(
        1.0, ge=0, le=1e6, description="hidden states between the blocks, relative per token"
    )
    attention: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="KL of the attention probabilities, of each head and the reference's that it "
        "was made of; of the mean over heads where the models do not have as many",
    )
    labels: float = Field(
        0.0, ge=0, le=1e6, description="cross entropy of the data's own labels, for classification"
    )

    @model_validator(mode="after")
    def _something_is_learned(self) -> LossWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("every weight is 0, so nothing would be learned")
        return self


class Learning(Section):
    """optimizer/reduce/learn/distill.py; the model and its teacher are in memory whole.

    PLACE: of the section in a recipe.
    """

    PLACE: ClassVar[str]

    data: DataSpec | None = Field(
        None, description="texts without labels suffice; the calibration's when absent"
    )
    samples: int = Field(
        20_000,
        ge=1,
        le=MANY,
        description="texts, or for text-generation windows of sequence_length tokens; all when "
        "the data has fewer",
    )
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="text-generation: windows of the reference's own text to learn from, beside "
        "the given ones; none of them judges",
    )
    held_out: int = Field(
        256, ge=1, le=MANY, description="of those, how many only judge what is kept"
    )
    sequence_length: Length = Field(128, description="texts are cut to this many tokens")
    batch_size: BatchSize = 32
    steps: int = Field(2000, ge=1, le=MANY, description="updates of the weights, a batch each")
    max_hours: float | None = Field(
        None,
        gt=0,
        le=10_000,
        description="fewer steps where this machine would need longer; decided after the first "
        "ones, again at each measurement on held-out data, and recorded",
    )
    learning_rate: Rate | Literal["auto"]
    warmup: float = Field(
        0.05, ge=0, lt=1, description="share of the steps in which the rate rises; then it falls"
    )
    patience: int = Field(
        8,
        ge=1,
        le=MANY,
        description="stop after so many of the 20 measurements on held-out data in a row that "
        "bring nothing better",
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="of the probabilities in the output loss"
    )
    losses: LossWeights = LossWeights()
    device: Literal["auto", "cpu", "cuda"] = "cpu"
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=THREADS)] = Field(
        "auto",
        description="that train together, a share of every batch each, through accelerate; auto: "
        "one for each GPU, one on a CPU",
    )
    seed: Seed = 0

    @property
    def step(self) -> str:
        """What the step that reads it is called."""
        return self.PLACE.rpartition(".")[2]

    @model_validator(mode="after")
    def _texts_suffice(self) -> Learning:
        needed = self.held_out + self.batch_size
        if self.samples < needed:
            raise ValueError(
                f"samples is {self.samples}, and {self.held_out} are held out and "
                f"{self.batch_size} make a batch; give samples: {needed} or more, or a smaller "
                "held_out"
            )
        return self

    @model_validator(mode="after")
    def _rows_for_every_process(self) -> Learning:
        if self.processes != "auto" and self.processes > self.batch_size:
            raise ValueError(
                f"processes is {self.processes} and a batch has {self.batch_size} rows, so that "
                "some would have none; give fewer processes or a larger batch_size"
            )
        return self


class Recover(Learning):
    """What a smaller model learns from the one it came from."""

    PLACE: ClassVar[str] = "reduce.recover"

    method: Literal["distill"] = "distill"
    learning_rate: Rate = Field(5e-4, description="of AdamW at its highest, after the warm-up")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where both models are while learning; auto: a GPU where torch sees one"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="what products are computed in while learning; weights, losses and what is "
        "judged stay fp32. auto: bf16 where steps of this model, timed in both, are faster in it; "
        "recorded, with the times",
    )


class Qat(Learning):
    """Quantization-aware training (optimizer/reduce/learn/qat.py): weights, scales, ranges, norm
    weights and biases of the compressed model follow the gradient of the losses, in the arithmetic
    that its integers have. With losses: {output: 0, hidden: 0, labels: 1} it learns from labels
    alone."""

    PLACE: ClassVar[str] = "qat"

    device: Literal["cpu"] = "cpu"
    learning_rate: Rate | Literal["auto"] = Field(
        "auto",
        description="of AdamW for weights at its highest, after the warm-up; auto: found by short "
        "trials, each judged on held-out texts; recorded",
    )
    scale_rate: Rate | None = Field(
        None,
        description="the same for the logarithms of scales and of the ends of ranges; absent: what "
        "moves the largest integers by as much of a step as weights move",
    )
