"""Base class of every section of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Block of a recipe: immutable, with strict types, and without unknown keys.

    RENAMED: {key of an earlier version: its name today}; the error for an old key names the new one
    """

    RENAMED: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
