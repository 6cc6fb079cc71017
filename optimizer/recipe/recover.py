"""Sections reduce.recover and qat: how a model learns from the reference."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from optimizer.foundation.sections.fields import MANY, BatchSize, Device, Length, Seed
from optimizer.foundation.sections.section import Section
from optimizer.harness.bounds import THREADS
from optimizer.recipe.data import DataSpec

Rate = Annotated[float, Field(gt=0, le=1)]


class LossWeights(Section):
    """Recipe's weights of the losses in optimizer/reduce/methods/losses.py. Each loss is divided by
    its value before the first step, so that equal weights give equal influence."""

    output: float = Field(
        1.0,
        ge=0,
        le=1e6,
        description="loss on the task's output: KL of the output probabilities, or cosine of the "
        "embeddings and of every pair of them",
    )
    hidden: float = Field(
        1.0, ge=0, le=1e6, description="loss on hidden states between blocks, relative per token"
    )
    attention: float = Field(
        0.0,
        ge=0,
        le=1e6,
        description="KL of the attention probabilities, per head and the reference's head that it "
        "came from; over the mean of heads where the numbers of heads differ",
    )
    labels: float = Field(
        0.0, ge=0, le=1e6, description="cross entropy with the data's labels, for classification"
    )

    @model_validator(mode="after")
    def _something_is_learned(self) -> LossWeights:
        if not any(getattr(self, name) for name in type(self).model_fields):
            raise ValueError("every weight is 0, so nothing would be learned; give one above 0")
        return self


class Learning(Section):
    """Recipe's options of learning from the reference (optimizer/reduce/learn/distill.py). The
    model and its teacher are both held in memory.

    PLACE: path of the section in a recipe
    """

    PLACE: ClassVar[str]

    data: DataSpec | None = Field(
        None, description="texts, labels not needed; default: the calibration data"
    )
    samples: int = Field(
        20_000,
        ge=1,
        le=MANY,
        description="number of texts, or for text-generation of windows of sequence_length tokens; "
        "all where the data has fewer",
    )
    generated: int = Field(
        0,
        ge=0,
        le=100_000,
        description="text-generation: number of windows that the reference writes, to learn "
        "from in addition to the given ones; none is held out",
    )
    held_out: int = Field(
        256, ge=1, le=MANY, description="number of samples held out to choose the best weights"
    )
    sequence_length: Length = Field(128, description="maximum tokens per text")
    batch_size: BatchSize = 32
    steps: int = Field(2000, ge=1, le=MANY, description="updates of the weights, one batch each")
    max_hours: float | None = Field(
        None,
        gt=0,
        le=10_000,
        description="time limit: steps are reduced where this machine would need longer; decided "
        "after the first steps and at each measurement on held-out data; recorded",
    )
    learning_rate: Rate | Literal["auto"]
    warmup: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="share of the steps in which the learning rate rises; then it falls",
    )
    patience: int = Field(
        8,
        ge=1,
        le=MANY,
        description="stop after this many of the 20 measurements on held-out data in a row without "
        "improvement",
    )
    temperature: float = Field(
        1.0, gt=0, le=100, description="temperature of the probabilities in the output loss"
    )
    losses: LossWeights = LossWeights()
    device: Device = Field(
        "auto",
        description="device of both models while learning; auto: a GPU where torch can use one",
    )
    processes: Literal["auto"] | Annotated[int, Field(ge=1, le=THREADS)] = Field(
        "auto",
        description="processes that train together, each on a share of every batch, through "
        "accelerate; auto: one per GPU, one on a CPU",
    )
    seed: Seed = 0

    @property
    def step(self) -> str:
        """Name of the stage that reads the section."""
        return self.PLACE.rpartition(".")[2]

    @model_validator(mode="after")
    def _texts_suffice(self) -> Learning:
        needed = self.held_out + self.batch_size
        if self.samples < needed:
            raise ValueError(
                f"samples is {self.samples}, less than held_out ({self.held_out}) and one batch "
                f"({self.batch_size}); give samples: {needed} or more, or a smaller held_out"
            )
        return self

    @model_validator(mode="after")
    def _rows_for_every_process(self) -> Learning:
        if self.processes != "auto" and self.processes > self.batch_size:
            raise ValueError(
                f"processes is {self.processes}, and a batch has only {self.batch_size} rows to "
                "share; give fewer processes or a larger batch_size"
            )
        return self


class Recover(Learning):
    """Recipe section on the training of a reduced model on the outputs of the model it was made
    from."""

    PLACE: ClassVar[str] = "reduce.recover"

    method: Literal["distill"] = "distill"
    learning_rate: Rate = Field(
        5e-4, description="highest learning rate of AdamW, after the warm-up"
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto",
        description="float type of matrix products while learning; weights, losses and evaluation "
        "stay fp32. auto: bf16 where steps of this model are faster in it, by a timing of both; "
        "recorded",
    )


class Qat(Learning):
    """Recipe section on quantization-aware training (optimizer/reduce/learn/qat.py): trains
    weights, scales, ranges, norm weights and biases of the compressed model in its integer
    arithmetic. With losses: {output: 0, hidden: 0, labels: 1} it learns from labels alone."""

    PLACE: ClassVar[str] = "qat"

    learning_rate: Rate | Literal["auto"] = Field(
        "auto",
        description="highest learning rate of AdamW for weights, after the warm-up; auto: found by "
        "short trials on held-out texts; recorded",
    )
    scale_rate: Rate | None = Field(
        None,
        description="the same for the logarithms of scales and of range ends; default: the rate "
        "that moves the largest integers as far as weights move, in quantization steps",
    )
