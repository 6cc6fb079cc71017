"""What `optimize run` and `optimize step` do with a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from optimizer.commands.outcome import Result


@dataclass(frozen=True)
class Request:
    """The command line of a run. lock: what the recipe must agree with before anything is done."""

    recipe: Path
    overrides: tuple[str, ...]
    store: Path
    artifacts: Path
    lock: Path | None = None
    until: str = "package"
    ignore_estimate: bool = False
    remeasure: bool = False


def carry_out(request: Request) -> Result:
    """Read and check the recipe, compare what it needs with this machine, and run it."""
    from optimizer import pipeline
    from optimizer.commands import checked, predictions, room
    from optimizer.commands.outcome import finish
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Store

    resolved, lines = checked.read(request.recipe, request.overrides, fetch=True, lock=request.lock)
    with recipe_file.located(lines):
        if not request.ignore_estimate:
            dry = Store(request.store, dry=True, until=request.until)
            pipeline.run(resolved, dry)
            room.check(predictions.document(dry), request.store, room.memory_of_this_machine())
        return finish(
            resolved,
            request.store,
            request.artifacts,
            until=request.until,
            remeasure=request.remeasure,
        )
