"""The sections of a recipe about serving: how a bundle's server batches, and what it must keep."""

from __future__ import annotations

import math
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
KEPT = "kept in the bundle, whose server takes it where its command line says no other"
OF_TEXTS_CONTINUED = ("slots", "context", "first_token_p99_ms", "between_p99_ms", "new_tokens")
OF_BATCHES = ("rows", "delay_ms", "workers")


class Serve(Section):
    """What `optimize serve` does at once; `optimize tune-serving` finds it by measurement. Absent:
    the server's own defaults (harness/server/settings.py)."""

    rows: BatchSize | None = Field(None, description=f"of a batch; {KEPT}")
    delay_ms: int | None = Field(
        None, ge=0, le=bounds.DELAY_MS, description="that a batch waits for more rows"
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=bounds.THREADS,
        description="batches that run at once, each on its share of the threads; of ONNX Runtime "
        "on a CPU",
    )
    slots: int | None = Field(
        None, ge=1, le=bounds.SLOTS, description="text-generation: texts continued at once"
    )
    context: int | None = Field(
        None, ge=0, le=bounds.SEQUENCE, description="text-generation: tokens of a slot; 0: all"
    )
    max_wait: float | None = Field(
        None,
        ge=bounds.WAIT_LEAST,
        le=bounds.WAIT,
        description="seconds that requests may wait where more come than are answered",
    )


class Slo(Section):
    """What the bundle's own server must keep under load on this machine: gated after packaging, by
    the load test that `optimize load` is."""

    data: DataSpec | None = Field(None, description="texts to ask; neutral ones when absent")
    rate: Rate | None = Field(
        None,
        description="requests a second at which the objectives are to be met; absent: the highest "
        "rate that meets them is searched, and the gate asks that there is one",
    )
    seconds: float = Field(30, ge=0.1, le=86_400, description="of each run")
    burst: int = Field(1, ge=1, le=10_000, description="requests at the same instant")
    new_tokens: Length = Field(32, description="text-generation: to continue each text by")
    p99_ms: Milliseconds | None = Field(None, description="of the time to the whole answer")
    first_token_p99_ms: Milliseconds | None = None
    between_p99_ms: Milliseconds | None = Field(None, description="of the time between tokens")
    max_refused: Limit = Field(0.0, ge=0, le=1, description="share of requests")

    @property
    def limits(self) -> dict[str, float]:
        """{kind of time, as load_test/figures.py names it: ms}"""
        named = {
            "latency": self.p99_ms,
            "first_token": self.first_token_p99_ms,
            "between": self.between_p99_ms,
        }
        return {kind: limit for kind, limit in named.items() if limit is not None}

    @model_validator(mode="after")
    def _can_be_decided(self) -> Slo:
        from optimizer.harness.bundle.bench import (
            fewest,  # here: a recipe without slo is read faster
        )
        from optimizer.load_test.arrivals import mean_for

        if not self.limits:
            raise ValueError(
                "it has no objective; give p99_ms, and for text-generation first_token_p99_ms or "
                "between_p99_ms"
            )
        least = mean_for(fewest(99), self.burst)
        if self.rate is not None and self.rate * self.seconds < least:
            raise ValueError(
                f"rate: {self.rate:g} for {self.seconds:g} seconds is "
                f"{self.rate * self.seconds:.0f} requests on average, and {least:.0f} are needed "
                f"for a run to have the {fewest(99)} that bound a 99th percentile; set seconds: "
                f"{math.ceil(least / self.rate)} or more"
            )
        return self


def check(
    task: Task, targets: Sequence[TargetSection], sections: Mapping[str, Section | None]
) -> None:
    """Raise ValueError for a field of `serve` or `slo` that the task has no use for, and for an slo
    of a bundle that the harness cannot serve. sections: by their names in the recipe."""
    others = OF_BATCHES if task.generates else OF_TEXTS_CONTINUED
    for name, section in sections.items():
        fields = sorted(section.model_fields_set & set(others)) if section is not None else []
        if fields:
            raise ValueError(
                f"{name}.{fields[0]} is of models that "
                f"{'answer in one run' if task.generates else 'continue texts'}, and the task is "
                f"{task.name}; remove it"
            )
    serve = sections.get("serve")
    workers = serve.workers if isinstance(serve, Serve) else None
    parallel = any(t.runs_on in table.of(t.runtime).reentrant for t in targets)
    if workers and workers > 1 and not parallel:
        raise ValueError(
            f"serve.workers is {workers}, and no target runs several batches at once; remove it, "
            "or add a target such as {runtime: onnxruntime, device: cpu}"
        )
    if sections.get("slo") is not None and not any(table.of(t.runtime).runs for t in targets):
        raise ValueError(
            "slo is measured on the bundle's own server, and the harness runs none of the targets; "
            "remove it, or add a target such as {runtime: onnxruntime, device: cpu}"
        )
