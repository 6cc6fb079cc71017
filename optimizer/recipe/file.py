"""A recipe file: YAML with overrides and included data specs, to a checked Recipe.

Every complaint names file:line, the path, what was found and what is accepted; an unknown key
names the closest known one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from optimizer import targets
from optimizer.checks import timed_targets
from optimizer.foundation.errors import InputError, RecipeError, closest
from optimizer.foundation.reading import reading
from optimizer.foundation.yaml_lines import DEPTH, Lines, read_value, read_yaml
from optimizer.recipe.compression import methods
from optimizer.recipe.schema import Model, Recipe, Section

DATA_FIELDS = (
    ("calibrate", "data"),
    ("reduce", "calibrate", "data"),
    ("reduce", "recover", "data"),
    ("qat", "data"),
    ("validate", "data"),
    ("validate", "train"),
    ("validate", "latency", "data"),
    ("slo", "data"),
)


def read(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read, complete and check a recipe file; see read_with_lines."""
    return read_with_lines(path, overrides)[0]


def read_with_lines(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Lines]:
    """The recipe, checked against the schema and its targets, and where its values stand.

    overrides: "a.b=c" as given to --set; c is YAML. A `data:` that is a string names a spec
    file, looked for beside the current directory, then beside the recipe, then one level up.
    Raises RecipeError for the first thing that is wrong, with file:line and path.
    """
    document, lines = read_yaml(path)
    for override in overrides:
        _override(document, override, lines)
    for field in (*DATA_FIELDS, *_further_sets(document)):
        _inline_data(document, field, path, lines)
    with reading(path, error=RecipeError):
        try:
            recipe = Recipe.model_validate_json(json.dumps(document))
        except ValidationError as e:
            raise _explain(e, lines, document) from None
    with located(lines):
        targets.check(recipe)
        timed_targets.check(recipe)
    return recipe, lines


@contextmanager
def located(lines: Lines) -> Iterator[None]:
    """Put file:line before the `where` of an error that names a path of the recipe."""
    try:
        yield
    except InputError as e:
        path = e.where.split(":")[0].split(" ")[0]
        at = lines.where(_loc(path.split(".")))
        if _is_of_the_recipe(path.split("."), lines) and at not in e.where:
            raise type(e)(
                e.problem, where=f"{at}: {e.where}", accepted=e.accepted, fix=e.fix
            ) from None
        raise


def _is_of_the_recipe(keys: Sequence[str], lines: Lines) -> bool:
    """Whether a path names a field, and not a module of a decoder ("model.layers")."""
    if keys[0] not in lines.sections:
        return False
    if len(keys) == 1 or keys[0] != "model":
        return True
    return keys[1] in Model.model_fields


def _override(document: dict[str, Any], override: str, lines: Lines) -> None:
    where, equals, text = override.partition("=")
    keys = where.split(".")
    if not equals or not all(keys):
        raise RecipeError(
            f"{_short(override)!r} is not path=value",
            where="--set",
            accepted="e.g. --set quantize.method=rtn",
        )
    if len(keys) > DEPTH:
        raise RecipeError(f"its path has {len(keys):,} parts", where=f"--set {_short(override)}")
    at: Any = document
    for key in keys[:-1]:
        if isinstance(at, list) and _index(key, at):
            at = at[int(key)]
        elif isinstance(at, dict):
            at = at.setdefault(key, {})
        else:
            raise RecipeError(f"there is no {key!r} to go into", where=f"--set {_short(override)}")
    value = read_value(text, f"--set {_short(override)}")
    if isinstance(at, list) and _index(keys[-1], at):
        at[int(keys[-1])] = value
    elif isinstance(at, dict):
        at[keys[-1]] = value
    else:
        raise RecipeError(f"cannot set {keys[-1]!r} there", where=f"--set {_short(override)}")
    lines.note(_loc(keys), f"--set {_short(override)}")


def _is_number(key: str) -> bool:
    """isdigit alone also takes superscripts."""
    return key.isascii() and key.isdigit() and len(key) < 10


def _index(key: str, items: list[Any]) -> bool:
    return _is_number(key) and int(key) < len(items)


def _loc(keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(int(k) if _is_number(k) else k for k in keys)


def _short(override: str) -> str:
    return override if len(override) <= 120 else f"{override[:117]}..."


def _further_sets(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """The data fields of validate.also, one per name."""
    section = document.get("validate")
    also = section.get("also") if isinstance(section, dict) else None
    return [("validate", "also", name, "data") for name in also] if isinstance(also, dict) else []


def _inline_data(
    document: dict[str, Any], field: tuple[str, ...], recipe: Path, lines: Lines
) -> None:
    """Replace a data spec's file name by the file's content, and note where it came from."""
    section: Any = document
    for key in field[:-1]:
        section = section.get(key) if isinstance(section, dict) else None
    if not isinstance(section, dict) or section.get(field[-1]) is None:
        return
    spec = section[field[-1]]
    base = recipe.parent
    if isinstance(spec, str):
        places = (Path.cwd(), recipe.parent.resolve(), recipe.parent.resolve().parent)
        tried = [place / spec for place in dict.fromkeys(places)]
        with reading(lines.where(field), error=RecipeError):
            file = next((p for p in tried if p.is_file()), None)
        if file is None:
            raise RecipeError(
                f"no data spec {spec!r}; looked for {', '.join(map(str, tried))}",
                where=lines.where(field),
                fix="Give the path of a calibration/*.yaml file, or write the spec inline.",
            )
        base = file.parent
        spec, inner = read_yaml(file)
        lines.graft(field, inner)
    if isinstance(spec, dict):
        if "base" in spec:
            raise RecipeError("base is set by the loader", where=lines.where((*field, "base")))
        section[field[-1]] = {**spec, "base": str(base.resolve())}


def _explain(error: ValidationError, lines: Lines, document: dict[str, Any]) -> RecipeError:
    """The first validation error as one of our messages."""
    problems = error.errors()
    # A misspelt key also makes the right one missing: the misspelling is the thing to say.
    first = min(problems, key=lambda p: p["type"] != "extra_forbidden")
    loc = first["loc"]
    path = ".".join(map(str, loc))
    where = f"{lines.where(loc)}: {path}" if path else lines.where(loc)
    more = f" ({len(problems) - 1} more after this one)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        section = _section_at(loc[:-1], document)
        if loc[-1] in section.RENAMED:
            now = section.RENAMED[str(loc[-1])]
            return RecipeError(f"this key is called {now} now{more}", where=where, accepted=now)
        known = sorted((f.alias or n) for n, f in section.model_fields.items() if not f.exclude)
        return RecipeError(
            f"unknown key{closest(str(loc[-1]), known)}{more}",
            where=where,
            accepted=", ".join(known),
        )
    if first["type"] == "missing":
        return RecipeError(f"missing and required{more}", where=where)
    if first["type"] == "value_error":
        return RecipeError(first["msg"].removeprefix("Value error, ") + more, where=where)
    value = json.dumps(first["input"], default=str)
    message = first["msg"].removeprefix("Input should be ")
    hint = ""
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        hint = closest(first["input"], _words(first.get("ctx", {}).get("expected", "")))
    word = first["type"] == "string_type" and isinstance(first["input"], int | float)
    quoted = "Put it in quotes, if it is meant as a word." if word else ""
    return RecipeError(
        f"{value[:80]} was found{hint}{more}", where=where, accepted=message, fix=quoted
    )


def _words(expected: str) -> list[str]:
    return [w.strip(" '") for w in expected.replace(" or ", ",").split(",")]


def _section_at(loc: tuple[Any, ...], document: dict[str, Any]) -> type[Section]:
    """The section at `loc`, found by walking the models; of a target, its runtime's."""
    model: Any = Recipe
    named = False  # the next part is a name of the user's
    for part in loc:
        if isinstance(part, int) or named:
            if loc[0] == "targets" and model is Recipe:
                model = targets.of(document["targets"][part]["runtime"]).section
            named = False
            continue
        fields = {f.alias or n: f.annotation for n, f in model.model_fields.items()}
        annotation = fields.get(str(part)) or methods.method(str(part)).options
        named = get_origin(annotation) is dict
        options = [annotation, *get_args(annotation)]
        sections = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
        if sections:
            model = sections[0]
    section: type[Section] = model
    return section
