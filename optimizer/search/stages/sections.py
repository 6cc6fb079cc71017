"""Sections that the stages of a search read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from optimizer.foundation.sections.section import Section
from optimizer.recipe.stage_sections import Validation
from optimizer.recipe.target_field import AnyTarget
from optimizer.recipe.validate import Latency
from optimizer.search.stages.split import Part


class Judging(Section):
    """Section of a search's stage that judges the answers of one candidate.

    validation: section of the recipe's validation
    part: rows that are answered, the search's or the held-out ones
    alpha: error probability; the looks at the search's rows share it, held-out rows have one test
    """

    validation: Validation
    part: Part
    alpha: float = Field(gt=0, lt=1)


class Race(Section):
    """Section of a search's stage that times several candidates in turns.

    targets: {name of a system: its target}
    seconds: time limit for deciding if the candidate is faster or slower than the best so far
    purpose: "confirm" times again, whatever times the search has
    """

    targets: dict[str, AnyTarget]
    latency: Latency
    seconds: float
    purpose: Literal["search", "confirm"] = "search"
