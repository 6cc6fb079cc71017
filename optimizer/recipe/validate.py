"""Section `validate`: metric, evaluation data, timing and gates."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from optimizer.foundation.sections.fields import (
    BatchSize,
    Device,
    Length,
    Limit,
    Milliseconds,
    Name,
    Seconds,
)
from optimizer.foundation.sections.section import Section
from optimizer.harness import tasks
from optimizer.harness.bounds import ITERATIONS, TOKENS
from optimizer.recipe.data import DataSpec

Metric = Literal[
    "accuracy",
    "top5_accuracy",
    "agreement",
    "f1",
    "micro_f1",
    "exact_match",
    "spearman",
    "probe_accuracy",
    "retrieval",
    "recall_at_1",
    "recall_at_5",
    "ndcg",
    "mrr",
    "cosine",
    "perplexity",
    "log_likelihood",
    "map",
    "map50",
    "miou",
    "abs_rel",
    "delta1",
    "oks_map",
    "pck",
]

Depth = Literal["full", "sampled", "end_to_end"]


class Latency(Section):
    """Recipe section `validate.latency`: how targets are timed, and the gates on their times."""

    data: DataSpec | None = Field(
        None, description="texts to time; must not occur in the other data"
    )
    batch: tuple[BatchSize, ...] = Field((1,), min_length=1)
    sequence: tuple[Length, ...] = Field((128,), min_length=1)
    iterations: int = Field(
        40,
        ge=5,
        le=ITERATIONS,
        description="minimum timed rounds per cell of the batch x sequence grid, in all openings "
        "together; timing continues until the speed gates are decided or max_seconds have passed",
    )
    max_seconds: Seconds = Field(
        300,
        description="seconds of timing per target after which no further round starts; 0: "
        "`iterations` rounds, of two models that are compared a multiple of 6",
    )
    new_tokens: Length = Field(
        32, description="text-generation: tokens generated after each prompt"
    )
    p99_ms: Milliseconds | None = Field(
        None,
        description="limit on the first cell of the grid; text-generation: per new token",
    )
    must_beat_float: bool = True
    time_float: bool = Field(
        True,
        description="also time the float model, in its runtime; false where its weights do not fit "
        "into memory beside the candidate's",
    )

    @model_validator(mode="after")
    def _a_gate_on_float_times_it(self) -> Latency:
        if self.must_beat_float and not self.time_float:
            raise ValueError(
                "time_float: false leaves nothing for must_beat_float to compare with; set "
                "must_beat_float: false too"
            )
        return self

    @model_validator(mode="after")
    def _a_batch_fits(self) -> Latency:
        for axis in ("batch", "sequence"):
            values = getattr(self, axis)
            if len(set(values)) < len(values):
                raise ValueError(f"{axis}: {list(values)} lists a size twice; list it once")
        largest = max(self.batch) * max(self.sequence)
        if largest > TOKENS:
            raise ValueError(
                f"batch x sequence is up to {largest:,} tokens; accepted: up to {TOKENS:,}"
            )
        return self


class EvaluationSet(Section):
    """Recipe section on a further data set on which the quality is measured
    (validate/quality/evaluation.py)."""

    data: DataSpec
    report_only: bool = Field(False, description="report the difference on this set without a gate")


class Validate(Section):
    """Recipe section `validate`: how each target is judged against the reference."""

    data: DataSpec
    also: dict[Name, EvaluationSet] = Field(
        default_factory=dict,
        description="further evaluation sets by name, judged like `data` by the same metric and "
        "margin, each with separate gates",
    )
    train: DataSpec | None = Field(
        None, description="probe_accuracy: rows that the probe is fit on"
    )
    metric: Metric
    max_drop: Limit = Field(
        0.01,
        gt=0,
        le=100,
        description="non-inferiority margin of the metric, below 1; perplexity: of the mean "
        "negative log-likelihood, in nats per token, up to 100",
    )
    confidence: float = Field(0.95, gt=0.5, lt=1)
    min_cosine: Limit | None = Field(
        None, gt=0, le=1, description="gate: least mean cosine to float"
    )
    max_kl: Limit | None = Field(
        None,
        gt=0,
        le=100,
        description="text-generation: gate: maximum KL from float to candidate, nats per token",
    )
    min_top1: Limit | None = Field(
        None, gt=0, le=1, description="text-generation: gate: least share of equal next tokens"
    )
    sequence_length: Length = Field(
        512, description="text-generation: tokens per window of held-out text"
    )
    quantization_budget: Limit = Field(
        0.2,
        gt=0,
        le=100,
        description="ledger: maximum relative L2 change of the model's output by quantization; an "
        "output of zeros is a change of 1",
    )
    ledger: Depth | None = Field(
        None,
        description="modules that the ledger judges alone: all, a sample of each kind, or none; "
        "default: full up to 500 million parameters, else sampled",
    )
    batch_size: BatchSize = 8
    reference_device: Device = Field(
        "auto",
        description="device of the reference model's answers, on which quality is judged; the "
        "ledger computes on the CPU; auto: a GPU where torch can use one",
    )
    latency: Latency = Latency()

    @field_validator("max_drop")
    @classmethod
    def _is_a_drop_of_the_metric(cls, value: float, info: ValidationInfo) -> float:
        metric = info.data.get("metric", "perplexity")  # absent: refused by itself
        if value >= 1 and metric not in ("perplexity", "log_likelihood"):
            raise ValueError(
                f"a drop of {value:g} passes every candidate, as {metric} is at most 1; "
                "accepted: below 1 (of perplexity and log_likelihood, in nats per token: up to 100)"
            )
        return value


def check_metric(task: tasks.Task, section: Validate) -> None:
    """Refuse a recipe: raise ValueError where the metric does not apply to the task, or the data
    lack a column that it reads."""
    known, metric = task.metrics, section.metric
    if metric not in known:
        raise ValueError(
            f"metric {metric} does not apply to task {task.name}; accepted: {', '.join(known)}"
        )
    sets = {"data": section.data, **{f"also.{n}.data": s.data for n, s in section.also.items()}}
    for where, spec in sets.items():
        columns = spec.columns
        if known[metric] and not any(all(c in columns for c in way) for way in known[metric]):
            ways = " or ".join(" and ".join(way) for way in known[metric])
            missing = next(field for field in known[metric][0] if field not in columns)
            raise ValueError(
                f"metric {metric} needs a column for {ways} in {where}.columns, which has "
                f"{', '.join(columns)}; add e.g. {missing}: <column of the data set>"
            )
    if metric != "probe_accuracy":
        return
    if section.train is None or "label" not in section.train.columns:
        what = "a train block" if section.train is None else "a column for label in train.columns"
        raise ValueError(f"metric probe_accuracy fits a classifier on train rows and needs {what}")
    for where, spec in sets.items():
        if section.train.labels and spec.labels and section.train.labels != spec.labels:
            raise ValueError(
                f"{where}.labels {list(spec.labels)} and train.labels {list(section.train.labels)} "
                "differ, so one id has two meanings; give both the same labels"
            )


def check_timing(task: tasks.Task, latency: Latency) -> None:
    """Refuse a recipe: raise ValueError where the number of `iterations` is too small to decide
    p99_ms for any latencies."""
    from optimizer.harness.bounds import fewest

    if latency.max_seconds > 0 or latency.p99_ms is None:
        return
    runs = math.ceil(fewest(99) / (latency.new_tokens - 1 if task.generates else 1))
    if latency.iterations < runs:
        raise ValueError(
            f"latency.iterations: {latency.iterations} with max_seconds: 0 can never decide "
            f"p99_ms, which takes {runs} runs or more; set iterations: {runs}, or remove "
            "max_seconds, so that timing continues until the gate is decided"
        )
