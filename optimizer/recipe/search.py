"""Section `search`: variants of a model that `optimize search` tries, and the rules for judging
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from optimizer.foundation.sections.fields import MANY, Limit, Milliseconds, Seed
from optimizer.foundation.sections.section import Section
from optimizer.recipe.compression.quantize import MethodName
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.validate import Latency

HOUR = 3600  # seconds
RATES = ("throughput", "cost_per_million")
"""Objectives that are functions of the time of the largest batch."""
TIMED_SHARE = 4
"""Time of a search / the part of it that timing the trials may take, and the same again for the two
timings of a confirmation: a choice that leaves half of the time for making and answering."""


def _listed(value: Any) -> Any:
    """Return one method's name in a recipe as a tuple, and a list of names, applied in order, as a
    tuple."""
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


Methods = Annotated[tuple[MethodName, ...], BeforeValidator(_listed), Field(min_length=1)]


class Over(Section):
    """Recipe section `search.over`: options that a search varies. An absent one takes every value
    that the targets and the model allow."""

    method: tuple[Methods, ...] | None = Field(
        None,
        min_length=1,
        description="methods to try, each a name or a list of names that are applied together; "
        "default: every one that suits the recipe",
    )
    precision: Literal["per_module", "recipe"] = Field(
        "per_module",
        description="per_module: also with the modules that cost most accuracy in higher "
        "precision, at several shares of the weights; recipe: the precision of section "
        "quantize alone",
    )
    targets: Literal["all"] | tuple[Annotated[int, Field(ge=0)], ...] = Field(
        "all", description="targets to try, by their index in `targets`"
    )
    attention: tuple[Literal["float", "int8"], ...] | None = Field(
        None,
        min_length=1,
        description="values of quantize.activations.attention; default: those that a target and "
        "the model admit",
    )
    size: tuple[Annotated[float, Field(gt=0, le=1)], ...] | None = Field(
        None,
        min_length=1,
        description="values of reduce.goal.keep, the share of the weights in the blocks; 1.0 is "
        "the model as it is; default: the recipe's own",
    )
    server: bool = Field(
        False,
        description="true: also settings of the server of the candidate that was found, under the "
        "objectives of section slo: serve.rows, delay_ms, workers, slots, max_wait",
    )

    @field_validator("targets")
    @classmethod
    def _some_target(cls, value: Any) -> Any:
        if not value:
            raise ValueError("no target is listed; list indices of targets, or use all")
        return value

    @model_validator(mode="after")
    def _listed_once(self) -> Over:
        for name in ("method", "targets", "attention", "size"):
            values = getattr(self, name)
            if isinstance(values, tuple) and len(set(values)) < len(values):
                raise ValueError(f"{name} lists a value twice; list it once")
        return self


class Constraints(Section):
    """Recipe section on the limits that the candidate that a search finds must meet."""

    max_drop: Limit | None = Field(
        None,
        alias="quality.max_drop",
        gt=0,
        le=100,
        description="margin of the metric; default: validate.max_drop",
    )
    p99_ms: Milliseconds | None = Field(
        None,
        alias="latency.p99_ms",
        description="limit on the first cell of validate.latency; default: its p99_ms",
    )
    size_mb: Limit | None = Field(
        None, gt=0, description="megabytes (10^6 bytes) of the model's files in the bundle"
    )
    memory_mb: Limit | None = Field(
        None, gt=0, description="peak resident megabytes of a process that answers one batch"
    )


class Budget(Section):
    """Recipe section on the limits on the duration of a search."""

    hours: float = Field(
        2.0,
        gt=0,
        le=10_000,
        description="hours for trials and confirmation; no step starts that is predicted to end "
        "later. Of a resumed search those before count too",
    )
    trials: int = Field(200, ge=1, le=MANY, description="trials, at most")

    @property
    def seconds(self) -> float:
        """`hours` in seconds."""
        return self.hours * HOUR

    def find_seconds_of_timing(self, candidates: int) -> float:
        """Return the maximum seconds for deciding that one trial is faster or slower than the best
        one so far.

        candidates: number of candidates
        """
        return self.seconds / (TIMED_SHARE * min(self.trials, candidates))

    @property
    def seconds_of_confirming(self) -> float:
        """Maximum seconds of each timing of a confirmation: beside the recipe, and for its
        gates."""
        return self.seconds / (2 * TIMED_SHARE)


class Search(Section):
    """Recipe section `search`: search for the variant that minimises the objective within the
    constraints."""

    over: Over = Over()
    objective: Literal["latency", "throughput", "cost_per_million", "size", "quality"] = Field(
        "latency",
        description="figure that is best: latency: time end to end, or between tokens, in the "
        "first cell of validate.latency; throughput: answers, or tokens, per second with the "
        "largest batch of validate.latency; cost_per_million: cost of a million of them, by "
        "--price-per-hour; size: bytes of the model's files; quality: drop of the metric (of "
        "perplexity: nats), under a limit on size, p99 or memory",
    )
    constraints: Constraints = Constraints()
    budget: Budget = Budget()
    seed: Seed = 0

    @field_validator("objective", mode="before")
    @classmethod
    def _energy_is_measured_of_a_bundle(cls, value: Any) -> Any:
        if value == "energy":
            raise ValueError(
                "a search does not measure energy; minimise the time per answer with objective: "
                "throughput, and run `optimize measure` on the bundles to compare, which has "
                "joules per answer where a counter can be read"
            )
        return value

    @model_validator(mode="after")
    def _quality_has_a_limit(self) -> Search:
        limits = self.constraints
        if self.objective == "quality" and not (
            limits.size_mb or limits.p99_ms or limits.memory_mb
        ):
            raise ValueError(
                "objective: quality without a limit would find the candidate with the most float; "
                "add constraints.size_mb, latency.p99_ms or memory_mb"
            )
        return self

    @property
    def timed(self) -> bool:
        """True where the recipe's objective or a constraint needs times."""
        return self.by_time or self.constraints.p99_ms is not None

    @property
    def by_time(self) -> bool:
        """True where the best candidate of the recipe's search is the one of the lowest time."""
        return self.objective in ("latency", *RATES)

    def choose_batch(self, latency: Latency) -> int:
        """Return the batch size with which a search times its candidates: the largest for a rate,
        else the first."""
        return max(latency.batch) if self.objective in RATES else latency.batch[0]


def check(search: Search, reduce: Reduce | None, others: Sequence[str], *, slo: bool) -> None:
    """Refuse a recipe: raise ValueError where a search cannot vary this recipe's model.

    others: names of the sections among qat and sparsity that the recipe has
    slo: True where the recipe has a section slo
    """
    if search.over.server and not slo:
        raise ValueError(
            "search.over.server is true, and the recipe has no section slo, whose objectives the "
            "settings of the server must meet; add one, such as slo: {rate: 50, p99_ms: 60}, or "
            "remove search.over.server"
        )
    sizes = search.over.size
    if others or (reduce is not None and sizes is None):
        hint = "" if others else ", or list the sizes to try in search.over.size"
        raise ValueError(
            f"search tries variants of the model as it is, and the recipe has "
            f"{others[0] if others else 'reduce'}; run that recipe first, and search from the "
            f"checkpoint that it writes{hint}"
        )
    if reduce is not None and (reduce.goal is None or reduce.goal.keep is None):
        raise ValueError(
            "search.over.size has values of reduce.goal.keep, and the recipe has another goal; use "
            "reduce.goal: {keep: ...}"
        )
