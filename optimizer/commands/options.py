"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from optimizer.shared_store import Root, SharedStore

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_STORE, DEFAULT_CACHE = "artifacts/store", "artifacts/store-cache"
TableFile = tuple[Path, Path | None]
"""(file of a table of `optimize measure`, public key that must have signed it)."""


def _also(name: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    """Return a callback that lets the flag `name` of `optimize` also stand after the subcommand."""

    def callback(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        if value and ctx.parent is not None:
            ctx.parent.params[name] = True
            ctx.obj["json" if name == "json_output" else name] = True
        return value

    return callback


def with_debug_and_json(command: F) -> F:
    """Let --debug and --json stand after the name of a subcommand of `optimize`."""
    command = click.option(
        "--json",
        is_flag=True,
        expose_value=False,
        callback=_also("json_output"),
        help="Print one JSON document on stdout.",
    )(command)
    return click.option(
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=_also("debug"),
        help="Show the traceback of an error.",
    )(command)


def with_store(text: str) -> Callable[[F], F]:
    """Add --store and --store-cache to a command of `optimize`, which gets `store`. text: first
    words of --store's help"""

    def decorate(command: F) -> F:
        @wraps(command)
        def located(*arguments: Any, store: str, store_cache: Path | None, **others: Any) -> Any:
            return command(*arguments, store=_located(store, store_cache), **others)

        for decorate in (
            click.option(
                "--store-cache",
                type=click.Path(path_type=Path),
                metavar="FOLDER",
                help="Folder for the steps of a --store in a bucket, on this machine.  [default: "
                f"{DEFAULT_CACHE}]",
            ),
            click.option(
                "--store",
                default=DEFAULT_STORE,
                show_default=True,
                metavar="FOLDER|ADDRESS",
                help=f"{text}; or s3://BUCKET/PREFIX, gs:// or az:// (docs/store.md).",
            ),
        ):
            located = decorate(located)
        return cast(F, located)

    return decorate


def _located(store: str, cache: Path | None) -> Root:
    if "://" in store:
        return SharedStore(store, cache or Path(DEFAULT_CACHE))
    if cache is not None:
        raise click.UsageError("--store-cache is for a --store in a bucket, such as s3://NAME/x.")
    return Path(store)


def with_recipe(command: F) -> F:
    """Add to a command of `optimize` RECIPE, --set, --deterministic (an override), with_store's
    options, --debug and --json."""

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
                help="Override one value of the recipe, e.g. --set quantize.method=rtn; "
                "repeatable.",
            ),
            click.option(
                "--deterministic",
                is_flag=True,
                help="Make the same compressed model on every x86-64 processor, bit for bit; about "
                "twice as slow. Same as --set compress.deterministic=true.",
            ),
            with_store("Folder of finished steps"),
        )
    ):
        decorated = decorate(decorated)
    return decorated


with_artifacts = click.option(
    "--artifacts",
    type=click.Path(path_type=Path),
    default="artifacts",
    show_default=True,
    help="Parent folder of the bundle, ARTIFACTS/<recipe name>/<version>/.",
)


def lock_beside(recipe: Path) -> Path:
    """Return the default of the option --lock: RECIPE.lock.json in the same folder."""
    return recipe.with_name(f"{recipe.stem}.lock.json")


def with_lock(command: F) -> F:
    """Add --locked and --lock FILE to a command of `optimize`, which gets `lock`, a path or
    None."""

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
            help="Same as --locked, with this lock or a bundle's manifest.json.",
        ),
        click.option(
            "--locked",
            is_flag=True,
            help="Refuse (exit 2), before any work, a recipe, checkpoint, data or packages that "
            "differ from RECIPE.lock.json, written by `optimize lock`.",
        ),
    ):
        resolved = decorate(resolved)
    return cast(F, resolved)


class FiniteRange(click.FloatRange):
    """Type of an option on the command line: numbers of a range; it refuses NaN, which passes every
    comparison, and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert an option's value to a number; fail the command line for NaN or infinity."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def with_price(text: str) -> Callable[[F], F]:
    """Add --price-per-hour to a command of `optimize`, which gets `price`, None if it is not given.
    text: help"""
    price = FiniteRange(0, min_open=True)
    return click.option("--price-per-hour", "price", type=price, help=text)


def _with_signature(what: str) -> Callable[[F], F]:
    """Add --require-signature to a command of `optimize`, which gets `key`, None if it is not
    given.

    what: the signed thing, for the help
    """
    return click.option(
        "--require-signature",
        "key",
        type=click.Path(path_type=Path),
        metavar="KEY",
        help=f"Refuse {what} not signed with the private key of this public key (PEM).",
    )


with_key = _with_signature("a bundle")


def with_times(text: str) -> Callable[[F], F]:
    """Add --times and --require-signature to a command of `optimize`, which gets `times`.

    `times` is (file of a table, public key that must have signed it or None); None without --times.

    text: help of --times
    """

    def decorate(command: F) -> F:
        @wraps(command)
        def paired(*arguments: Any, times: Path | None, key: Path | None, **others: Any) -> Any:
            if key is not None and times is None:
                raise click.UsageError("--require-signature is for the table of --times.")
            table = None if times is None else (times, key)
            return command(*arguments, times=table, **others)

        option = click.option("--times", type=click.Path(path_type=Path), help=text)
        return cast(F, option(_with_signature("--times")(paired)))

    return decorate


with_version = click.option(
    "--at-least", metavar="VERSION", help="Refuse a bundle older than this version."
)


def with_policy(command: F) -> F:
    """Add --require-signature and --at-least to a command of `optimize`, which gets `key` and
    `at_least`, None if not given."""
    return with_key(with_version(command))
