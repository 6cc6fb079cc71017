"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_STORE = "artifacts/store"


def _also(name: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    """Let a group option be given after the command's name too."""

    def callback(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        if value and ctx.parent is not None:
            ctx.parent.params[name] = True
            ctx.obj["json" if name == "json_output" else name] = True
        return value

    return callback


def with_debug_and_json(command: F) -> F:
    """--debug and --json after the command's name."""
    command = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_also("json_output"),
        help="One JSON document on stdout.",
    )(command)
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_also("debug"),
        help="Show the traceback of an error.",
    )(command)


def with_recipe(command: F) -> F:
    """The arguments every command that reads a recipe has. --deterministic is an override."""

    @wraps(command)
    def overridden(
        *arguments: Any, overrides: tuple[str, ...], deterministic: bool, **others: Any
    ) -> Any:
        if deterministic:
            overrides = (*overrides, "compress.deterministic=true")
        return command(*arguments, overrides=overrides, **others)

    decorated = with_debug_and_json(cast(F, overridden))
    for decorate in reversed(
        (
            click.argument("recipe", type=click.Path(path_type=Path)),
            click.option(
                "--set",
                "overrides",
                multiple=True,
                metavar="A.B=C",
                help="Override one value, e.g. --set quantize.method=rtn",
            ),
            click.option(
                "--deterministic",
                is_flag=True,
                help="The same compressed model on every x86-64 processor, to the bit; about twice "
                "as slow. As --set compress.deterministic=true",
            ),
            click.option(
                "--store",
                type=click.Path(path_type=Path),
                default=DEFAULT_STORE,
                show_default=True,
                help="Where finished steps are kept.",
            ),
        )
    ):
        decorated = decorate(decorated)
    return decorated


with_artifacts = click.option(
    "--artifacts",
    type=click.Path(path_type=Path),
    default="artifacts",
    show_default=True,
    help="Where the bundle is put: ARTIFACTS/<recipe name>/<version>/.",
)


def lock_beside(recipe: Path) -> Path:
    """Where the lock of a recipe is when nothing else is said."""
    return recipe.with_name(f"{recipe.stem}.lock.json")


def with_lock(command: F) -> F:
    """--locked and --lock FILE; the command gets `lock`, the file or None."""

    @wraps(command)
    def resolved(
        *arguments: Any, recipe: Path, locked: bool, lock: Path | None, **others: Any
    ) -> Any:
        lock = lock_beside(recipe) if locked and lock is None else lock
        return command(*arguments, recipe=recipe, lock=lock, **others)

    for decorate in (
        click.option(
            "--lock",
            type=click.Path(path_type=Path),
            metavar="LOCK",
            help="As --locked, by this lock, or by a bundle's manifest.json.",
        ),
        click.option(
            "--locked",
            is_flag=True,
            help="Refuse (exit 2), before any work, where recipe, checkpoint, data or packages are "
            "not those of RECIPE.lock.json, which `optimize lock` wrote.",
        ),
    ):
        resolved = decorate(resolved)
    return cast(F, resolved)


def with_policy(command: F) -> F:
    """What a bundle from elsewhere must be before it is taken: whose, and how old."""
    command = click.option("--at-least", metavar="VERSION", help="Refuse an older version.")(
        command
    )
    return click.option(
        "--require-signature",
        "key",
        type=click.Path(path_type=Path),
        metavar="KEY",
        help="Refuse a bundle that the owner of this public key (PEM) did not sign.",
    )(command)
