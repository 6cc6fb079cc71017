"""Sections that stages read: one record per stage, made from a recipe for `pipeline.run`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from optimizer.foundation.errors import suggest
from optimizer.foundation.sections.fields import Device, Gigabytes
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.embeddings import Embeddings
from optimizer.recipe.recover import Qat, Recover
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.serving import Slo
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.validate import Latency, Validate


def _task(name: str) -> tasks.Task:
    """Look up the record of a recipe's task. Raises ValueError for an unknown one."""
    try:
        return tasks.find_task(name)
    except KeyError:
        known = tasks.list_names()
        raise ValueError(
            f"{name!r} is not a task{suggest(name, known)} Accepted: {', '.join(known)}"
        ) from None


def _list_tasks(schema: dict[str, Any]) -> None:
    schema["enum"] = tasks.list_names()


Task = Annotated[
    str, AfterValidator(lambda name: _task(name).name), Field(json_schema_extra=_list_tasks)
]


LEARNING = ("calibrate", "reduce.calibrate", "reduce.recover.data", "qat.data")
"""Data sets to learn from, by their paths in the recipe, which judge nothing."""


ADAPTERS = "model.adapters.sources."


def name_adapter_place(name: str) -> str:
    """Return the path in the recipe of the texts that judge an adapter kept apart from the
    model."""
    return f"{ADAPTERS}{name}.data"


def list_data_specs(
    calibrate: Calibrate | None,
    validate: Validate,
    reduce: Reduce | None = None,
    qat: Qat | None = None,
    slo: Slo | None = None,
    embeddings: Embeddings | None = None,
    adapters: Mapping[str, DataSpec | None] = MappingProxyType({}),
) -> dict[str, DataSpec]:
    """Return {path in the recipe: data set} of every data set."""
    own = reduce.calibrate if reduce else None
    recover = reduce.recover if reduce else None
    named = {
        "calibrate": calibrate.data if calibrate else None,
        "reduce.calibrate": own.data if own else None,
        "reduce.recover.data": recover.data if recover else None,
        "qat.data": qat.data if qat else None,
        "validate.data": validate.data,
        **{f"validate.also.{name}.data": part.data for name, part in validate.also.items()},
        "validate.train": validate.train,
        "validate.latency.data": validate.latency.data,
        "slo.data": slo.data if slo else None,
        "embeddings.queries": embeddings.queries if embeddings else None,
        "embeddings.documents": embeddings.documents if embeddings else None,
        **{name_adapter_place(name): spec for name, spec in adapters.items()},
    }
    return {place: spec for place, spec in named.items() if spec is not None}


PARTIAL_SUMS = 64
"""Maximum number of partial sums."""


class Compress(Section):
    """Recipe section on the device, memory and arithmetic with which compress goes through the
    blocks."""

    device: Device = Field(
        "auto",
        description="device of the block that is compressed (reduce computes on the CPU); auto: a "
        "GPU where torch can use one, except with deterministic",
    )
    device_memory_gb: Gigabytes | None = Field(
        None, description="most GPU memory, in GB; default: what is free"
    )
    memory_gb: Gigabytes = Field(
        4.0, description="activations held in memory, in GB; further ones go to disk"
    )
    precision: Literal["fp32", "bf16", "auto"] = Field(
        "fp32",
        description="float type of matrix products during calibration. bf16 is several times "
        "faster than fp32 on some processors, slower on others; auto: bf16 where a product of "
        "this model is faster in it, by a timing of both; recorded",
    )
    partial_sums: int = Field(
        1,
        ge=1,
        le=PARTIAL_SUMS,
        description="number of parts of the calibration data whose sums are measured apart and "
        "then added, in a fixed order; each beyond the first changes the rounding of the sums",
    )
    processes: int = Field(
        1,
        ge=1,
        le=PARTIAL_SUMS,
        exclude=True,  # not part of a step's key
        description="processes that walk over the blocks together, each with a share of the "
        "calibration data, through accelerate; one per GPU. The result has the same bytes for any "
        "number",
    )
    deterministic: bool = Field(
        False,
        description="same bytes on every x86-64 processor, by kernels that all of them have, on "
        "one thread; about twice as slow",
    )

    @property
    def memory_bytes(self) -> int:
        """The recipe's `memory_gb` in bytes."""
        return int(self.memory_gb * 1e9)

    @property
    def chosen_device(self) -> Device:
        """The recipe's `device`, or cpu with `deterministic`, because GPUs cannot give the same
        bytes."""
        return "cpu" if self.deterministic else self.device

    @property
    def device_memory_bytes(self) -> int | None:
        """The recipe's `device_memory_gb` in bytes; None without a limit."""
        return None if self.device_memory_gb is None else int(self.device_memory_gb * 1e9)

    @property
    def decided(self) -> Literal["fp32", "bf16"]:
        """The recipe's `precision`, once auto has been resolved (compress/walk/precision.py)."""
        assert self.precision != "auto"
        return self.precision

    @model_validator(mode="after")
    def _partial_sums_for_every_process(self) -> Compress:
        if self.processes > self.partial_sums:
            raise ValueError(
                f"processes is {self.processes}, and there are {self.partial_sums} partial sums of "
                f"calibration data to share; give partial_sums: {self.processes}, or fewer "
                "processes"
            )
        return self

    @model_validator(mode="after")
    def _portable_products_are_float32(self) -> Compress:
        if self.deterministic and self.precision != "fp32":
            raise ValueError(
                "deterministic: the kernels that every processor has multiply in fp32; use "
                "precision: fp32"
            )
        if self.deterministic and self.device == "cuda":
            raise ValueError(
                "deterministic: no GPU gives the bytes of the kernels that every processor has; "
                "use device: cpu"
            )
        return self


def reads_activations(quantize: Quantize, sparsity: Sparsity | None) -> bool:
    """Return True where the recipe's quantization or pruning reads activations. Otherwise compress
    does not read the data of `calibrate`."""
    pruned = sparsity is not None and sparsity.record.calibrated
    return pruned or quantize.activations is not None or quantize.calibrated


class Compression(Section):
    """Section of the compress stage: calibration, pruning and quantization in one walk."""

    calibrate: Calibrate | None
    quantize: Quantize
    task: Task
    compress: Compress = Compress()
    sparsity: Sparsity | None = None

    @property
    def effective(self) -> Compression:
        """Section without `calibrate`, if no method reads activations."""
        if reads_activations(self.quantize, self.sparsity):
            return self
        return self.model_copy(update={"calibrate": None})

    @property
    def float_reference(self) -> bool:
        """True where a method of the recipe compares with the float model's hidden states at the
        same place."""
        pruned = self.sparsity is not None and self.quantize.leaves_float
        return self.quantize.float_reference or (
            pruned and self.sparsity is not None and self.sparsity.float_target
        )


class Reduction(Section):
    """Section of the reduce stage.

    calibrate: reduce.calibrate, or the recipe's calibrate; None where no criterion needs data
    """

    reduce: Reduce
    calibrate: Calibrate | None
    task: Task
    compress: Compress = Compress()


class Latencies(Section):
    """Section of the latencies stage.

    reduce: the recipe's reduce, with only the options that determine sizes
    compression: the recipe's compression, changed by composition.cheapen to cheap methods
    target: target that is timed
    """

    reduce: Reduce
    compression: Compression
    target: AnyTarget
    latency: Latency

    @property
    def reduction(self) -> Reduction:
        """Section of the recipe with which a checkpoint is opened as the reduce stage opens it."""
        task = self.compression.task
        return Reduction(reduce=self.reduce, calibrate=None, task=task)


class Recovery(Section):
    """Section of the recover stage.

    data: data of reduce.recover; by default calibrate's
    """

    recover: Recover
    data: DataSpec
    task: Task


class QuantizationAware(Section):
    """Section of the qat stage.

    data: data of qat; by default calibrate's
    """

    qat: Qat
    data: DataSpec
    task: Task


class Validation(Section):
    """Section of the validate stage: the gates, and the target to judge."""

    validate_: Validate = Field(alias="validate")
    quantize: Quantize
    calibrate: Calibrate | None
    reduce: Reduce | None = None
    recovery: Recovery | None = None
    training: QuantizationAware | None = None
    target: AnyTarget
    sparsity: Sparsity | None = None
    embeddings: Embeddings | None = None
    adapters: dict[str, DataSpec | None] = Field(
        default_factory=dict,
        description="texts that judge each adapter kept apart; None: those of validate.data",
    )
    texts: Validation | None = Field(
        None, description="section of the side of texts, of a model that embeds images and texts"
    )


class FailedTarget(Section):
    """Target with `on_fail: drop` that failed in a stage.

    target: index in recipe.targets
    stage: name of the stage
    message: message of the error
    """

    target: int
    stage: str
    message: str
