"""The type of `targets:` in a recipe: the section of the runtime that it names (targets.py)."""

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

from optimizer import targets
from optimizer.foundation.errors import closest
from optimizer.recipe.targets import TargetSection


def _section(value: Any, known: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """The section that the runtime's own class makes of `value`."""
    if not isinstance(value, Mapping):
        return value if isinstance(value, TargetSection) else known(value)
    name = str(value.get("runtime", ""))
    try:
        section = targets.of(name).section
    except KeyError:
        names = targets.names()
        missing = f"runtime {name!r} is not known{closest(name, names)}"
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
    _SECTIONS = dict.fromkeys(t.section for t in targets.TARGETS.values())
    AnyTarget = Annotated[
        reduce(or_, _SECTIONS),
        Field(discriminator="runtime"),
        WrapValidator(_section),
        WrapSerializer(_plain),
    ]
"""The JSON schema has the table's sections; a target of another distribution has its own."""
