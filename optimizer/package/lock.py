"""Write and check locks: a recipe, checkpoint, data and packages, with their digests.

    lock_version   1
    recipe         the recipe with every default
    source         {source, revision, files: {name: {sha256, size}}}: the checkpoint
    calibration    {use: sha256 of the rows}
    packages       {distribution: version}

A bundle's manifest.json has the same fields, and so is a lock too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.harness.trust.verify import parse
from optimizer.load.stage import origin
from optimizer.package.rebuilt import compare_inputs
from optimizer.package.stage import MADE_WITH, data_digests
from optimizer.recipe.schema import Recipe
from optimizer.store import package_version

VERSION = 1
LARGEST = 16 << 20  # bytes of a lock file
FIELDS = ("recipe", "source", "calibration", "packages")
NAMED = 5
"""Maximum differences named in a message."""


def lock(recipe: Recipe) -> dict[str, Any]:
    """Return the content of a recipe's lock. Fetches a checkpoint and data sets from a hub."""
    return {
        "lock_version": VERSION,
        "recipe": recipe.bundled.model_dump(mode="json", by_alias=True),
        "source": origin(recipe.model),
        "calibration": data_digests(recipe),
        "packages": {p: v for p in MADE_WITH if (v := package_version(p)) is not None},
    }


def check(recipe_file: Path, recipe: Recipe, against: Path) -> None:
    """Raise RecipeError, naming up to NAMED differences, where a recipe, its data or packages
    differ from the lock or the manifest.json at the path `against`."""
    differences = compare_inputs(read(against), lock(recipe))
    if differences:
        more = len(differences) - NAMED
        raise RecipeError(
            "; ".join(differences[:NAMED]) + (f"; and {more} more" if more > 0 else ""),
            where=f"{recipe_file}, compared with {against}",
            fix="Restore what differs, or write a new lock: optimize lock.",
        )


def read(path: Path) -> dict[str, Any]:
    """Read a file of `optimize lock`, or a bundle's manifest.json, which has the same fields.
    Raises RecipeError for any other file."""
    accepted = "a file written by `optimize lock`, or a bundle's manifest.json"
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError(f"above {LARGEST:,} bytes")
        document = parse(path.read_bytes())
        files = document["source"]["files"]
        if not all(isinstance(document[field], dict) for field in FIELDS):
            raise ValueError("a field is not an object")
        if not all(isinstance(entry["sha256"], str) for entry in files.values()):
            raise ValueError("a file has no sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise RecipeError(
            f"the file is not a lock ({type(e).__name__}: {e})",
            where=str(path),
            accepted=accepted,
            fix="Write one: optimize lock RECIPE.",
        ) from None
    return dict(document)
