"""What each stage reads of a recipe: the sections that `pipeline.run` passes on, a record each."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from optimizer.foundation.errors import closest
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.recover import Qat, Recover
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.serving import Slo
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.validate import Latency, Validate


def _task(name: str) -> tasks.Task:
    """The record of a task. Raises ValueError for one that is not known."""
    try:
        return tasks.task(name)
    except KeyError:
        known = tasks.names()
        raise ValueError(
            f"{name!r} is not a task{closest(name, known)} Accepted: {', '.join(known)}"
        ) from None


def _list_tasks(schema: dict[str, Any]) -> None:
    schema["enum"] = tasks.names()


Task = Annotated[
    str, AfterValidator(lambda name: _task(name).name), Field(json_schema_extra=_list_tasks)
]


def data_specs(
    calibrate: Calibrate | None,
    validate: Validate,
    reduce: Reduce | None = None,
    qat: Qat | None = None,
    slo: Slo | None = None,
) -> dict[str, DataSpec]:
    """Every data set by its place in the recipe."""
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
    }
    return {place: spec for place, spec in named.items() if spec is not None}


class Compress(Section):
    """How the walk over the blocks is carried out."""

    memory_gb: float = Field(
        4.0,
        ge=1e-9,
        le=100_000,
        description="activations kept in memory; what is beyond it goes to disk",
    )
    precision: Literal["fp32", "bf16", "auto"] = Field(
        "fp32",
        description="what products are computed in while calibrating. bf16 is several times faster "
        "than fp32 on some processors, and slower on others; auto: bf16 where a product of this "
        "model, timed in both, is faster in it; recorded, with the times",
    )
    deterministic: bool = Field(
        False,
        description="the same bytes on every x86-64 processor: kernels that all of them have, on "
        "one thread; about twice as slow",
    )

    @property
    def decided(self) -> Literal["fp32", "bf16"]:
        """`precision`, of a section in which it is no longer auto (compress/walk/precision.py)."""
        assert self.precision != "auto"
        return self.precision

    @model_validator(mode="after")
    def _portable_products_are_float32(self) -> Compress:
        if self.deterministic and self.precision != "fp32":
            raise ValueError(
                "deterministic: kernels that every processor has multiply in fp32; use precision: "
                "fp32"
            )
        return self


class Compression(Section):
    """What the compress stage reads: calibration, pruning and quantization are one walk."""

    calibrate: Calibrate | None
    quantize: Quantize
    task: Task
    compress: Compress = Compress()
    sparsity: Sparsity | None = None

    @property
    def float_reference(self) -> bool:
        """Whether anything compares with the float model's hidden states at the same place."""
        pruned = self.sparsity is not None and self.quantize.leaves_float
        return self.quantize.float_reference or (
            pruned and self.sparsity is not None and self.sparsity.float_target
        )


class Reduction(Section):
    """What the reduce stage reads. calibrate: what the reduce section names, else the recipe's;
    none where nothing is chosen by data."""

    reduce: Reduce
    calibrate: Calibrate | None
    task: Task
    compress: Compress = Compress()


class Latencies(Section):
    """What the latencies stage reads. reduce: what sizes follow from, and no more; compression: of
    the same form as the recipe's, by what costs least; target: the one that is timed."""

    reduce: Reduce
    compression: Compression
    target: AnyTarget
    latency: Latency

    @property
    def reduction(self) -> Reduction:
        """What a checkpoint is opened with for being made smaller."""
        task = self.compression.task
        return Reduction(reduce=self.reduce, calibrate=None, task=task)


class Recovery(Section):
    """What the recover stage reads. data: what the section names, else the calibration's."""

    recover: Recover
    data: DataSpec
    task: Task


class QuantizationAware(Section):
    """What the qat stage reads. data: what the section names, else the calibration's."""

    qat: Qat
    data: DataSpec
    task: Task


class Validation(Section):
    """What the validate stage reads: the gates, and the target they are judged on."""

    validate_: Validate = Field(alias="validate")
    quantize: Quantize
    calibrate: Calibrate | None
    reduce: Reduce | None = None
    recovery: Recovery | None = None
    training: QuantizationAware | None = None
    target: AnyTarget
    sparsity: Sparsity | None = None


class LeftOut(Section):
    """A target of `on_fail: drop` that a stage could not make. target: its place in the recipe."""

    target: int
    stage: str
    message: str
