"""Write the recipe that a search found, so that `optimize run` makes the same model.

The file is the user's recipe with other sections `quantize`, `targets`, `reduce` and `serve`, the
limits of the search in `validate`, and without `search`. It lies beside the recipe, where relative
paths mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe

LIMITS = ("p99_ms", "max_seconds")  # of validate.latency, which a search changes
HEADER = "# Found by `optimize search {name}`; comments are in that file.\n"


def check_place(recipe: Path, out: Path) -> None:
    """Check the file for a search's result: raise RecipeError for one in another folder than the
    recipe, or the recipe itself."""
    if out.resolve() == recipe.resolve():
        raise RecipeError(
            f"{out} is the recipe itself", where="--out", fix="Name another file of its folder."
        )
    if out.resolve().parent != recipe.resolve().parent:
        raise RecipeError(
            f"{out} lies in another folder than the recipe, where its relative paths would start "
            "elsewhere",
            where="--out",
            accepted=f"a file in {recipe.resolve().parent}",
        )


def remove_earlier(recipe: Path, out: Path) -> bool:
    """Remove the recipe that an earlier search of this recipe wrote; return True if there was
    one."""
    header = HEADER.format(name=recipe.name)
    written = out.is_file() and out.read_text("utf-8", errors="replace").startswith(header)
    if written:
        out.unlink()
    return written


def write(
    recipe: Path,
    overrides: Sequence[str],
    index: int,
    chosen: Recipe,
    out: Path,
    comment: str = "",
) -> None:
    """Write the recipe `chosen` by a search to `out`.

    recipe, overrides: the searched recipe's file, and "a.b=c" as given to --set
    index: index of the target that was found
    comment: a line for the top of the file, such as the objective

    Raises RecipeError where the file would not be read as `chosen`: for a relative path in an
    override, which started at the current folder.
    """
    document = recipe_file.read_as_written(recipe, overrides)
    document.pop("search", None)
    target = {k: v for k, v in document["targets"][index].items() if k != "on_fail"}
    document["targets"] = [target]
    document["quantize"] = chosen.quantize.model_dump(
        mode="json", by_alias=True, exclude_unset=True
    )
    reduce = document.pop("reduce", None) or {}
    if chosen.reduce is not None and chosen.reduce.goal is not None:
        goal = chosen.reduce.goal.model_dump(mode="json", exclude_unset=True)
        document["reduce"] = {**reduce, "goal": goal}
    if chosen.serve is not None:
        document["serve"] = chosen.serve.model_dump(mode="json", exclude_unset=True)
    _set_limits(document["validate"], chosen)
    text = HEADER.format(name=recipe.name) + (f"# {comment}\n" if comment else "")
    text += yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)
    atomic.write(out, text.encode())
    if recipe_file.read(out) != chosen:
        out.unlink()
        raise RecipeError(
            "the recipe that was found cannot be written: a path in --set starts at the current "
            "folder",
            where="--set",
            fix="Write that path into the recipe, and search again: finished steps are reused.",
        )


def _set_limits(validate: dict[str, Any], chosen: Recipe) -> None:
    validate["max_drop"] = chosen.validate_.max_drop
    latency = chosen.validate_.latency
    limits = {name: getattr(latency, name) for name in LIMITS if name in latency.model_fields_set}
    if limits:
        validate["latency"] = {**validate.get("latency", {}), **limits}
