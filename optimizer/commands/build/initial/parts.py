"""Split the rows of a file into the parts of a recipe, and write a file of each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data.splitting import Key, split
from optimizer.foundation import atomic
from optimizer.foundation.errors import DataError

FEWEST = 60  # rows from which parts can be made
PARTS = {"calibrate": 256, "time": 64, "evaluate": 2_000}  # maximum rows of each
FAIR = {"calibrate": 0.3, "time": 0.1}  # maximum share of each; the evaluation gets the rest


def check_number(rows: Sequence[Any], file: Path) -> None:
    """Raise DataError if a data set for a new recipe has fewer rows than FEWEST."""
    if len(rows) < FEWEST:
        raise DataError(
            f"it has {len(rows)} usable rows",
            where=f"--data {file}",
            accepted=f"{FEWEST} or more; 800 make a useful evaluation",
            fix="Bring more rows like those that the model will read.",
        )


def split_rows(
    inputs: Sequence[Sequence[Key]],
    labels: Sequence[Any],
    size: int,
    most: Mapping[str, int] = PARTS,
    fix: str = "",
) -> dict[str, list[int]]:
    """Split rows into the parts of a new recipe so that no input is in two parts.

    Returns {part: indices of its rows} for the parts "calibrate", "time" and "evaluate".

    inputs: keys of each row's inputs; equal inputs have equal keys
    labels: label of each row, or None
    size: size of all data, in rows or characters
    most: maximum size of each part, in the same unit
    fix: advice for an empty part; "": a general one

    Raises DataError for a part without rows.
    """
    shares = {part: min(most[part] / size, FAIR[part]) for part in ("calibrate", "time")}
    shares["evaluate"] = min(most["evaluate"] / size, 1 - sum(shares.values()))
    parts = split(inputs, labels, shares)
    if empty := [part for part, chosen in parts.items() if not chosen]:
        raise DataError(
            f"part {empty[0]} is empty: too many of {len(inputs)} rows share an input",
            where="--data",
            accepted="rows that can be split without a common input",
            fix=fix or "Write the recipe without --data, and bring a file for each part.",
        )
    return parts


def write_part(file: Path, content: bytes, recipe_folder: Path) -> str:
    """Write for a new recipe the file of a part of the data; return its name in the new recipe.
    Raises DataError for a file that exists with another content."""
    if file.exists() and file.read_bytes() != content:
        raise DataError(
            "the file exists already, with other rows",
            where=str(file),
            fix="Give another folder: --split FOLDER; or remove this one.",
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(file, content)
    return os.path.relpath(file.resolve(), recipe_folder.resolve())
