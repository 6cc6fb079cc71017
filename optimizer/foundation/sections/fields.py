"""Types of values that several sections share, each with its bounds.

Bounds refuse typing errors and attacks before any work. They lie above the memory and time of any
known machine.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic.json_schema import SkipJsonSchema

from optimizer.harness import bounds

MANY = 10_000_000  # samples, windows, iterations; the largest data sets here have 10,000
WIDE, LONG = bounds.BATCH, bounds.SEQUENCE  # maximum rows per batch, tokens per text
SMALLEST = 1e-12  # least limit or margin that is not 0
PATH = 4096  # characters, Linux's own limit
RESERVED = (
    ".failed",
    ".partial",
    ".lock",
    ".tar",
    ".discarded",
    ".published.json",
)  # endings of files beside the folder of a version


def _refuse_nearly_zero(value: float) -> float:
    """Return the number. Raises ValueError for one so close to 0 that it must be a typing error."""
    if 0 < abs(value) < SMALLEST:
        raise ValueError(f"closer to 0 than {SMALLEST}, which is taken for a typing error")
    return value


Limit = Annotated[float, AfterValidator(_refuse_nearly_zero)]  # of a measurement, or a margin
Milliseconds = Annotated[Limit, Field(gt=0, le=3_600_000)]  # an hour
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch and numpy both take
BatchSize = Annotated[int, Field(ge=1, le=WIDE)]
Length = Annotated[int, Field(ge=2, le=LONG)]
Seconds = Annotated[float, Field(ge=0, le=604_800)]  # a week
Gigabytes = Annotated[float, Field(ge=1e-9, le=100_000)]  # of 10^9 bytes
Device = Literal["auto", "cpu", "cuda"]  # of torch; auto: a GPU where torch can use one
# name of a file or folder, not a path; endings are added, and file systems allow 255 bytes
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100)]


def _refuse_reserved(name: str) -> str:
    if name.endswith(RESERVED):
        raise ValueError(
            f"{name!r} has an ending reserved for files beside the bundle ({', '.join(RESERVED)}); "
            "choose another name"
        )
    return name


def _inside(path: str) -> str:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} leaves the source; accepted: a folder inside it")
    return path


Version = Annotated[Name, AfterValidator(_refuse_reserved)]
Column = Annotated[str, Field(min_length=1, max_length=256)]
Pattern = Annotated[str, Field(min_length=1, max_length=PATH, pattern=r"\S")]
Inside = Annotated[str, Field(min_length=1, max_length=PATH), AfterValidator(_inside)]
# folder where relative paths of a section start, set by the loader: neither a key of the recipe nor
# recorded; "" is the current folder
Base = Annotated[SkipJsonSchema[str], Field(exclude=True)]
