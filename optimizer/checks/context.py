"""Settings that each check of a recipe gets besides the recipe itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optimizer.store import STAGES


@dataclass(frozen=True)
class Context:
    """Settings with which a recipe is checked, such as how far the run will go.

    early: True: also check what `run` would find in its first minute; see loadable.check
    fetch: True: also read configs of models on a hub; else only files on this machine
    until: last stage that will run; requirements of later stages are not checked
    file: the recipe's file, named in messages
    lock: lock file, or a bundle's manifest.json, that the recipe must agree with; None: not
        compared
    """

    early: bool = False
    fetch: bool = False
    until: str = STAGES[-1]
    file: Path = Path("recipe.yaml")
    lock: Path | None = None

    def reaches(self, stage: str) -> bool:
        """Return True where the run to be checked has `stage`, that is, where it is not after
        `until`."""
        return STAGES.index(stage) <= STAGES.index(self.until)
