"""Arguments of the checks of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimizer.store import STAGES


@dataclass(frozen=True)
class Context:
    """Arguments of a check beside the recipe.

    early: also check what `run` finds by itself in its first minute; see loadable.check
    fetch: also read the configs of models on a hub; else only those on this machine
    until: last stage that will run; what only later stages need is not checked
    file: the recipe's file, named in messages
    lock: lock file, or a bundle's manifest.json, that the recipe must agree with; or None
    """

    early: bool = False
    fetch: bool = False
    until: str = STAGES[-1]
    file: Path = Path("recipe.yaml")
    lock: Path | None = None

    def reaches(self, stage: str) -> bool:
        """Return True where the run comes as far as this stage."""
        return STAGES.index(stage) <= STAGES.index(self.until)
