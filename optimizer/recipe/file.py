"""Read a recipe file: YAML, overrides and included data specs -> Recipe, checked by its schema.

Every message names file:line, the path, the value found and the values accepted; for an unknown key
also the closest known one. Called by checks.read, which runs the further checks.

A relative path in a recipe or a data spec starts at the folder of that file; one given to --set
starts at the current folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError

from optimizer.foundation.errors import InputError, OptimizeError, RecipeError, join, suggest
from optimizer.foundation.reading import reading
from optimizer.foundation.yaml_lines import DEPTH, Lines, read_value, read_yaml
from optimizer.recipe.compression import methods
from optimizer.recipe.schema import DataSpec, Model, Recipe, Section
from optimizer.recipe.target_field import find_section

LISTED = 20  # maximum errors of the schema that are listed
LISTS = ("tuple_type", "list_type")  # types of pydantic's errors where a list is needed
DATA_FIELDS = (
    ("calibrate", "data"),
    ("reduce", "calibrate", "data"),
    ("reduce", "recover", "data"),
    ("qat", "data"),
    ("validate", "data"),
    ("validate", "train"),
    ("validate", "latency", "data"),
    ("slo", "data"),
    ("embeddings", "queries"),
    ("embeddings", "documents"),
    ("texts", "calibrate", "data"),
    ("texts", "validate", "data"),
    ("texts", "validate", "latency", "data"),
)
LAYOUT = "oci-layout:"  # an address that is a folder


def read(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe's file; see read_with_lines."""
    return read_with_lines(path, overrides)[0]


def read_with_lines(path: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, Lines]:
    """Return the recipe, checked by its schema, and the lines on which its values stand. Raises
    RecipeError as read_document and validate."""
    document, lines = read_document(path, overrides)
    return validate(path, document, lines), lines


def validate(path: Path, document: dict[str, Any], lines: Lines) -> Recipe:
    """Return the recipe of values read by read_document, checked by its schema.

    Raises RecipeError for everything that the schema refuses, with file:line and path.
    """
    with reading(path, error=RecipeError):
        try:
            return Recipe.model_validate_json(json.dumps(document))
        except ValidationError as e:
            problems = _causes(e)
            errors = [_explain(problem, lines, document) for problem in problems[:LISTED]]
            if problems[LISTED:]:
                errors.append(RecipeError(f"{len(problems) - LISTED} more errors", where=str(path)))
            error = join(errors)
            assert error is not None
            raise error from None


def select_valid_parts(document: dict[str, Any]) -> tuple[Model | None, list[DataSpec]]:
    """Return (model, data sets) of a recipe's values that the schema refuses, with the sections
    that are valid by themselves; None for an invalid model."""
    specs = [_at(document, field) for field in (*DATA_FIELDS, *_further_sets(document))]
    read = [_valid(DataSpec, spec) for spec in specs if spec is not None]
    return _valid(Model, document.get("model")), [s for s in read if s is not None]


def read_as_written(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the recipe's values as its file states them, with overrides. Data specs stay file
    names, and relative paths stay relative."""
    document, lines = read_yaml(path)
    for override in overrides:
        _override(document, override, lines)
    return document


S = TypeVar("S", bound=Section)


def _valid(section: type[S], value: object) -> S | None:
    try:
        return section.model_validate_json(json.dumps(value))
    except ValidationError:
        return None


def _at(document: dict[str, Any], field: tuple[str, ...]) -> Any:
    """Return the recipe's value at a path of keys; None where it is absent."""
    value: Any = document
    for key in field:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_document(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], Lines]:
    """Return the recipe's values and their lines, with data specs inside and every relative path
    placed at its folder. A `data:` that is a string names a spec file.

    overrides: "a.b=c" as given to --set; c is YAML

    Raises RecipeError for a file or an override that cannot be read.
    """
    if not path.exists():
        near = suggest(path.name, sorted(file.name for file in path.parent.glob("*.y*ml")))
        raise RecipeError(
            f"it cannot be read (no such file){near}",
            where=str(path),
            fix="Correct the path, or write a recipe with `optimize init`.",
        )
    document, lines = read_yaml(path)
    typed = [_override(document, override, lines) for override in overrides]

    def start(*loc: Any) -> Path:
        """Return the folder where a relative path at `loc` starts."""
        is_typed = any(loc[: len(keys)] == keys for keys in typed)
        return Path.cwd() if is_typed else path.parent.resolve()

    adapters = _mapping(_at(document, ("model", "adapters", "sources")))
    adapters |= {n: {"source": one} for n, one in adapters.items() if isinstance(one, str)}
    for field in (*DATA_FIELDS, *_further_sets(document)):
        _inline_data(document, field, start, lines)
    _set_base(document.get("model"), start("model", "source"), lines, ("model",))
    reduce = document.get("reduce")
    if isinstance(reduce, dict) and isinstance(reduce.get("student"), str):
        reduce["student"] = {"source": reduce["student"]}
    student = ("reduce", "student")
    _set_base(_at(document, student), start(*student, "source"), lines, student)
    _place_addresses(document, start)
    return document, lines


def _set_base(section: Any, folder: Path, lines: Lines, loc: tuple[str, ...]) -> None:
    """Set the folder where relative paths of a recipe's section start."""
    if not isinstance(section, dict):
        return
    if "base" in section:
        raise RecipeError("base is set by the loader; remove it", where=lines.where((*loc, "base")))
    section["base"] = str(folder)


def _list(value: Any) -> list[Any]:
    """Return a value of the recipe's file if it is a list, else []."""
    return value if isinstance(value, list) else []


def _place_addresses(document: dict[str, Any], start: Callable[..., Path]) -> None:
    """Rewrite folders among the addresses of `publish`, and the folder of npm, relative to the
    current folder."""

    def is_relative(folder: str) -> bool:
        return bool(folder.strip()) and "://" not in folder and not os.path.isabs(folder)

    publish, targets = (_list(document.get(key)) for key in ("publish", "targets"))
    for i, address in enumerate(publish):
        if isinstance(address, str) and address.startswith(LAYOUT):
            folder = address.removeprefix(LAYOUT)
            if is_relative(folder):
                publish[i] = LAYOUT + os.path.relpath(start("publish", i) / folder)
    for i, target in enumerate(targets):
        npm = target.get("npm") if isinstance(target, dict) else None
        if isinstance(npm, str) and is_relative(npm):
            target["npm"] = os.path.relpath(start("targets", i, "npm") / npm)


@contextmanager
def locate_errors(lines: Lines) -> Iterator[None]:
    """Inside, put file:line before the `where` of an error that names a path of the recipe."""
    try:
        yield
    except OptimizeError as e:
        first, *others = (_locate(one, lines) for one in (e, *e.further))
        first.further = tuple(others)
        if first is e:
            raise
        raise first from None


def _locate(error: OptimizeError, lines: Lines) -> OptimizeError:
    path = error.where.split(":")[0].split(" ")[0]
    at = lines.where(_loc(path.split(".")))
    within = _is_of_the_recipe(path.split("."), lines) and at not in error.where
    if not within or not isinstance(error, InputError):
        return error
    where = f"{at}: {error.where}"
    return type(error)(error.problem, where=where, accepted=error.accepted, fix=error.fix)


def _is_of_the_recipe(keys: Sequence[str], lines: Lines) -> bool:
    """Return True where `keys` are a path in the recipe; False for a module of a model
    ("model.layers")."""
    if keys[0] not in lines.sections:
        return False
    if len(keys) == 1 or keys[0] != "model":
        return True
    return keys[1] in Model.model_fields


def _override(document: dict[str, Any], override: str, lines: Lines) -> tuple[Any, ...]:
    """Set the recipe's value that one override of the command line names, and record its line;
    return its path."""
    where, equals, text = override.partition("=")
    keys = where.split(".")
    if not equals or not all(keys):
        raise RecipeError(
            f"{_short(override)!r} is not path=value",
            where="--set",
            accepted="e.g. --set quantize.method=rtn",
        )
    if len(keys) > DEPTH:
        raise RecipeError(f"the path has {len(keys):,} parts", where=f"--set {_short(override)}")
    at: Any = document
    for depth, key in enumerate(keys[:-1]):
        if isinstance(at, list) and _index(key, at):
            at = at[int(key)]
        elif isinstance(at, dict):
            at = at.setdefault(key, {})
        else:
            raise _explain_no_place(keys[:depth], key, at, override)
    value = read_value(text, f"--set {_short(override)}")
    if isinstance(at, list) and _index(keys[-1], at):
        at[int(keys[-1])] = value
    elif isinstance(at, dict):
        at[keys[-1]] = value
    else:
        raise _explain_no_place(keys[:-1], keys[-1], at, override)
    lines.note(_loc(keys), f"--set {_short(override)}")
    return _loc(keys)


def _explain_no_place(path: list[str], key: str, value: Any, override: str) -> RecipeError:
    """Make the error of an override whose path ends in the recipe before `key`.

    path: keys up to the value that the recipe has
    """
    place = ".".join(path)
    if isinstance(value, list):
        what, accepted = f"a list of {len(value)}", f"an index below {len(value)}"
    else:
        what, accepted = _short(repr(value)), f"--set {place}=..., which sets the whole of it"
    return RecipeError(
        f"{place} is {what} in the recipe, which has no {key!r}",
        where=f"--set {_short(override)}",
        accepted=accepted,
    )


def _is_number(key: str) -> bool:
    """Return True for a part of a path in the recipe that is ASCII digits; str.isdigit also accepts
    superscripts."""
    return key.isascii() and key.isdigit() and len(key) < 10


def _index(key: str, items: list[Any]) -> bool:
    return _is_number(key) and int(key) < len(items)


def _loc(keys: Sequence[str]) -> tuple[Any, ...]:
    return tuple(int(k) if _is_number(k) else k for k in keys)


def _short(override: str) -> str:
    return override if len(override) <= 120 else f"{override[:117]}..."


def _further_sets(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the paths in the recipe of the data fields in validate.also and in
    model.adapters.sources, one per name."""
    parts = [("validate", "also"), ("texts", "validate", "also"), ("model", "adapters", "sources")]
    return [(*part, name, "data") for part in parts for name in _mapping(_at(document, part))]


def _mapping(value: Any) -> dict[str, Any]:
    """Return a value of the recipe's file if it is a mapping, else {}."""
    return value if isinstance(value, dict) else {}


def _inline_data(
    document: dict[str, Any], field: tuple[str, ...], start: Callable[..., Path], lines: Lines
) -> None:
    """Replace the file name of a data spec in the recipe by the file's content, and record its
    lines."""
    spec = _at(document, field)
    if isinstance(spec, str):
        folder = start(*field)
        with reading(lines.where(field), error=RecipeError):
            is_file = (folder / spec).is_file()
        if not is_file:
            absolute = Path(spec).is_absolute()
            place = Path(spec).parent if absolute else f"{folder}, where its path starts"
            raise RecipeError(
                f"data spec {spec!r} was not found in {place}",
                where=lines.where(field),
                fix="Correct the path, or write the spec inline.",
            )
        base = (folder / spec).parent.resolve()
        spec, inner = read_yaml(folder / spec)
        lines.graft(field, inner)
        _at(document, field[:-1])[field[-1]] = spec
    else:
        base = start(*field, "files" if isinstance(spec, dict) and "files" in spec else "source")
    _set_base(spec, base, lines, field)


def _causes(error: ValidationError) -> list[Any]:
    """Return the problems of a refused recipe that do not follow from another one, such as those of
    a section around the faulty value, or of a default that needs it. Misspelt keys come first,
    because each also makes the right key missing."""
    problems: dict[Any, Any] = {}
    for problem in error.errors():
        if problem["type"] != "default_factory_not_called":
            # a union adds the alternative to the path, such as tuple[literal['int8'], ...]
            path = tuple(part for part in problem["loc"] if "[" not in str(part))
            first = problems.setdefault(path, {**problem, "loc": path})
            if problem["type"] in LISTS and first["type"] not in LISTS:
                first["msg"] += f" or {_describe_list(problem['input'])}"
    places = {path[:i] for path in problems for i in range(1, len(path))}
    causes = [p for path, p in problems.items() if path not in places]
    return sorted(causes, key=lambda p: p["type"] != "extra_forbidden")


def _explain(problem: Any, lines: Lines, document: dict[str, Any]) -> RecipeError:
    """Return an error of pydantic (ErrorDetails) on a recipe as a RecipeError."""
    loc = problem["loc"]
    path = ".".join(map(str, loc))
    where = f"{lines.where(loc)}: {path}" if path else lines.where(loc)
    if problem["type"] == "extra_forbidden":
        section = _section_at(loc[:-1], document)
        if loc[-1] in section.RENAMED:
            now = section.RENAMED[str(loc[-1])]
            return RecipeError(f"this key was renamed to {now}", where=where, accepted=now)
        known = sorted((f.alias or n) for n, f in section.model_fields.items() if not f.exclude)
        return RecipeError(
            f"unknown key{suggest(str(loc[-1]), known)}",
            where=where,
            accepted=", ".join(known),
        )
    if problem["type"] == "missing":
        return RecipeError("missing and required", where=where)
    if problem["type"] == "value_error":
        return RecipeError(problem["msg"].removeprefix("Value error, "), where=where)
    value = json.dumps(problem["input"], default=str)
    message = problem["msg"].removeprefix("Input should be ")
    hint = ""
    if problem["type"] in LISTS:
        message = _describe_list(problem["input"])
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        hint = suggest(problem["input"], _words(problem.get("ctx", {}).get("expected", "")))
    word = problem["type"] == "string_type" and isinstance(problem["input"], int | float)
    quoted = "Put it in quotes if it is meant as text." if word else ""
    return RecipeError(f"{value[:80]} was found{hint}", where=where, accepted=message, fix=quoted)


def _describe_list(value: Any) -> str:
    """Describe the list that a recipe's key takes in place of `value`."""
    if isinstance(value, str | int | float):
        return f"a list, such as [{json.dumps(value)[:80]}]"
    return "a list"


def _words(expected: str) -> list[str]:
    return [w.strip(" '") for w in expected.replace(" or ", ",").split(",")]


def _section_at(loc: tuple[Any, ...], document: dict[str, Any]) -> type[Section]:
    """Return the class of the section at `loc`; for a target, of its runtime's section."""
    model: Any = Recipe
    named = False  # the next part is a name chosen by the user
    for part in loc:
        if isinstance(part, int) or named:
            if loc[0] == "targets" and model is Recipe:
                model = find_section(document["targets"][part]["runtime"])
            named = False
            continue
        fields = {f.alias or n: f.annotation for n, f in model.model_fields.items()}
        annotation = fields.get(str(part)) or methods.find_method(str(part)).options
        named = get_origin(annotation) is dict
        options = [annotation, *get_args(annotation)]
        sections = [o for o in options if isinstance(o, type) and issubclass(o, Section)]
        if sections:
            model = sections[0]
    section: type[Section] = model
    return section
