"""Sections `serve` (defaults of a bundle's server) and `slo` (its objectives under load)."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from optimizer.foundation.sections.fields import BatchSize, Length, Limit, Milliseconds
from optimizer.foundation.sections.section import Section
from optimizer.harness import bounds
from optimizer.harness.runtimes import table
from optimizer.recipe.data import DataSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from optimizer.harness.tasks import Task
    from optimizer.recipe.targets import TargetSection

Rate = Annotated[float, Field(ge=0.01, le=100_000)]  # requests a second
KEPT = "default for the bundle's server; its command line overrides it"
OF_GENERATION = ("slots", "context", "first_token_p99_ms", "between_p99_ms", "new_tokens")
OF_BATCHES = ("rows", "delay_ms", "workers")


def solve_mean_requests(least: int, burst: int = 1, confidence: float = 0.95) -> float:
    """Compute, for the least requests of the recipe's `slo`, the mean number of requests of a load
    test whose random arrivals are `least` or more with probability `confidence`.

    burst: requests that arrive together

    Bursts arrive as a Poisson process, so the mean m solves m - z sqrt(burst m) = least, with the
    normal quantile z of `confidence`.
    """
    spread = NormalDist().inv_cdf(confidence) * math.sqrt(burst)
    return ((spread + math.sqrt(spread**2 + 4 * least)) / 2) ** 2


class Serve(Section):
    """Recipe section with the defaults of `optimize serve` for this bundle; `optimize tune-serving`
    measures good ones. Absent keys: the server's defaults (harness/server/options.py)."""

    rows: BatchSize | None = Field(None, description=f"maximum rows per batch; {KEPT}")
    delay_ms: int | None = Field(
        None, ge=0, le=bounds.DELAY_MS, description="milliseconds that a batch waits for more rows"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=bounds.THREADS,
        description="batches that run at once, each on its share of the threads; ONNX Runtime on a "
        "CPU only",
    )
    slots: int | None = Field(
        None,
        ge=1,
        le=bounds.SLOTS,
        description="text-generation: maximum requests in generation at once",
    )
    context: int | None = Field(
        None,
        ge=0,
        le=bounds.SEQUENCE,
        description="text-generation: tokens of context per slot; 0: the model's maximum",
    )
    max_wait: float | None = Field(
        None,
        ge=bounds.WAIT_LEAST,
        le=bounds.WAIT,
        description="queue limit: seconds that a request may wait under overload",
    )


class Slo(Section):
    """Recipe section on the objectives of the bundle's server under load on this machine, gated
    after packaging by the load test of `optimize load`."""

    data: DataSpec | None = Field(None, description="texts to send; default: neutral ones")
    rate: Rate | None = Field(
        None,
        description="requests per second at which the objectives must be met; default: search for "
        "the highest rate that meets them, and fail where there is none",
    )
    seconds: float = Field(30, ge=0.1, le=86_400, description="seconds per run")
    burst: int = Field(1, ge=1, le=10_000, description="requests sent at the same instant")
    new_tokens: Length = Field(32, description="text-generation: tokens generated per request")
    p99_ms: Milliseconds | None = Field(
        None, description="limit of the time to the complete answer"
    )
    first_token_p99_ms: Milliseconds | None = None
    between_p99_ms: Milliseconds | None = Field(
        None, description="limit of the time between tokens"
    )
    max_refused: Limit = Field(0.0, ge=0, le=1, description="maximum share of requests refused")

    @property
    def limits(self) -> dict[str, float]:
        """Return {kind of latency, as named in load_test/figures.py: limit in ms}."""
        named = {
            "latency": self.p99_ms,
            "first_token": self.first_token_p99_ms,
            "between": self.between_p99_ms,
        }
        return {kind: limit for kind, limit in named.items() if limit is not None}

    @model_validator(mode="after")
    def _can_be_decided(self) -> Slo:
        from optimizer.harness.bounds import fewest

        if not self.limits:
            raise ValueError(
                "no objective was given; add p99_ms, and for text-generation first_token_p99_ms or "
                "between_p99_ms"
            )
        least = solve_mean_requests(fewest(99), self.burst)
        if self.rate is not None and self.rate * self.seconds < least:
            raise ValueError(
                f"rate: {self.rate:g} for {self.seconds:g} seconds is "
                f"{self.rate * self.seconds:.0f} requests on average; accepted: {least:.0f} or "
                f"more, so that a run has the {fewest(99)} that bound a 99th percentile; set "
                f"seconds: {math.ceil(least / self.rate)} or more"
            )
        return self


def check(
    task: Task, targets: Sequence[TargetSection], sections: Mapping[str, Section | None]
) -> None:
    """Refuse a recipe: raise ValueError for a field of `serve` or `slo` that does not apply to the
    task, and for an slo where the harness cannot serve the bundle.

    sections: {name in the recipe: section}
    """
    others = OF_BATCHES if task.generates else OF_GENERATION
    for name, section in sections.items():
        fields = sorted(section.model_fields_set & set(others)) if section is not None else []
        if fields:
            raise ValueError(
                f"{name}.{fields[0]} "
                f"{'does not apply to' if task.generates else 'applies only to'} text generation, "
                f"and the task is {task.name}; remove it"
            )
    serve = sections.get("serve")
    workers = serve.workers if isinstance(serve, Serve) else None
    parallel = any(t.runs_on in table.look_up(t.runtime).reentrant for t in targets)
    if workers and workers > 1 and not parallel:
        raise ValueError(
            f"serve.workers is {workers}, and no target runs several batches at once; remove it, "
            "or add a target such as {runtime: onnxruntime, device: cpu}"
        )
    if sections.get("slo") is not None and not any(table.look_up(t.runtime).runs for t in targets):
        raise ValueError(
            "slo is measured on the bundle's server, and the harness runs none of the targets; "
            "remove it, or add a target such as {runtime: onnxruntime, device: cpu}"
        )
