"""Command `optimize check`, for a recipe or a bundle."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import click

from optimizer.commands.harness import harness
from optimizer.commands.options import with_key, with_recipe, with_version
from optimizer.foundation.progress import show
from optimizer.harness.shown import escape_line
from optimizer.shared_store import Root


def is_bundle(path: Path) -> bool:
    """Return True where `optimize check` is given a folder or a .tar, which cannot be a recipe."""
    return path.suffix == ".tar" or os.path.isdir(
        path
    )  # unlike Path.is_dir, raises for an impossible name


@click.command()
@with_recipe
@with_key
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    help="Signature file of the bundle.  [default: BUNDLE.sig]",
)
@with_version
@click.pass_obj
def check(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    key: Path | None,
    signature: Path | None,
    at_least: str | None,
) -> None:
    """Check RECIPE, or verify a bundle.

    Of RECIPE: its keys and values, its targets, the packages that they need, and where they are on
    this machine the model's config, tokenizer and headers of weights, and every row of the data.
    All errors are listed at once; no weights are read. Of a bundle (folder or tar): every file
    against the manifest; none of its code is run.

    \b
    Examples:
      optimize check recipes/minilm-int8.yaml
      optimize check artifacts/minilm-int8/1
      optimize check artifacts/minilm-int8/1 --require-signature public.pem
    """
    del store
    if is_bundle(recipe):
        if overrides:
            raise click.UsageError("--set is for a recipe, and this is a bundle; remove it.")
        options = {
            "--require-signature": key,
            "--signature": signature,
            "--at-least": at_least,
        }
        words = [w for o, value in options.items() if value is not None for w in (o, str(value))]
        harness("check", recipe, tuple(words), obj["json"])
    if any(option is not None for option in (key, signature, at_least)):
        raise click.UsageError(
            "--require-signature, --signature and --at-least are for a bundle, and this is a "
            "recipe; remove them."
        )
    from optimizer import checks

    resolved, lines = checks.read(recipe, overrides, fetch=False, early=True)
    if resolved.search is not None:
        from optimizer.recipe import file as recipe_file
        from optimizer.search import candidates

        with recipe_file.locate_errors(lines):
            space = candidates.list_candidates(resolved)
    names = [t.runtime for t in resolved.targets]
    if obj["json"]:
        show(resolved.model_dump_json(by_alias=True, indent=1))
    else:
        typed = escape_line(shlex.quote(str(recipe)))
        to = f" Publishes to: {', '.join(resolved.publish)}." if resolved.publish else ""
        from optimizer.load import source  # after checks.read looked at what libraries need

        model = resolved.model
        if not source.is_local(model.source, model.base):
            to += (
                f" Model {model.source} is not a folder here; optimize plan reads its config from "
                "the hub."
            )
        search = "" if resolved.search is None else "search "
        if resolved.search is not None:
            to += f" Search: {len(space)} candidates by {resolved.search.objective}."
        show(
            f"{escape_line(str(recipe))}: no error found. Targets: {', '.join(names)}.{to} "
            f"Next: optimize plan {typed}, then optimize {search}{typed}"
        )
