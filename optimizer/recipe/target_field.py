"""Type of an item of `targets:`. The item's key `runtime` selects the class of its section
(targets.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
)
from pydantic.functional_serializers import WrapSerializer
from pydantic.functional_validators import WrapValidator

from optimizer.foundation.errors import suggest
from optimizer.foundation.references import list_entry_points, load_entry_point
from optimizer.recipe.targets import GROUP, SECTIONS, TargetSection


def find_section(runtime: str) -> type[TargetSection]:
    """Look up the class of a recipe's target section by its runtime, which may come from the record
    of another distribution (targets/record.py: Target).

    Raises KeyError for an unknown runtime, TypeError for an entry point without a section.
    """
    if runtime in SECTIONS:
        return SECTIONS[runtime]
    record = load_entry_point(GROUP, runtime)
    section = getattr(record, "section", None)
    named = getattr(record, "name", None) == runtime
    if not (named and isinstance(section, type) and issubclass(section, TargetSection)):
        raise TypeError(f"the entry point {runtime} of {GROUP} is not a Target of that name")
    return section


def _section(value: Any, known: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Validate `value` with the section class of its runtime."""
    if not isinstance(value, Mapping):
        return value if isinstance(value, TargetSection) else known(value)
    name = str(value.get("runtime", ""))
    try:
        section = find_section(name)
    except KeyError:
        names = [*SECTIONS, *list_entry_points(GROUP)]
        missing = f"runtime {name!r} is not known{suggest(name, names)}"
        raise ValueError(
            f"{missing if name else 'runtime is missing'} (accepted: {', '.join(names)})"
        ) from None
    if info.mode == "json":  # where a list may stand for a tuple
        return section.model_validate_json(json.dumps(value))
    return section.model_validate(dict(value))


def _plain(value: Any, _known: SerializerFunctionWrapHandler, info: Any) -> Any:
    return value.model_dump(mode=info.mode, by_alias=bool(info.by_alias))


if TYPE_CHECKING:
    AnyTarget = TargetSection
else:
    AnyTarget = Annotated[
        reduce(or_, dict.fromkeys(SECTIONS.values())),
        Field(discriminator="runtime"),
        WrapValidator(_section),
        WrapSerializer(_plain),
    ]
"""The JSON schema lists the sections of SECTIONS, not those of other distributions."""
