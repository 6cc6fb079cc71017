"""The command `optimize check`, of a recipe and of a bundle."""

from __future__ import annotations

import os
from pathlib import Path

import click

from optimizer.commands.harness import harness
from optimizer.commands.options import with_recipe
from optimizer.foundation.progress import show
from optimizer.harness.shown import one_line


def is_bundle(path: Path) -> bool:
    """Whether the path is a folder or a tar: no recipe is either."""
    return path.suffix == ".tar" or os.path.isdir(path)  # which raises for no name


@click.command()
@with_recipe
@click.option(
    "--require-signature",
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="Refuse a bundle that the owner of this public key (PEM) did not sign.",
)
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    help="Of the bundle.  [default: BUNDLE.sig, beside it]",
)
@click.option("--at-least", metavar="VERSION", help="Refuse an older version of a bundle.")
@click.pass_obj
def check(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Path,
    require_signature: Path | None,
    signature: Path | None,
    at_least: str | None,
) -> None:
    """Check RECIPE against the schema, its targets, what is installed to judge them, the config of
    its model and the columns of its data where they are on this machine, reading no weights; or a
    bundle (a folder, or its tar) against its manifest, running nothing that is in it.

    \b
    Examples:
      optimize check recipes/minilm-int8.yaml
      optimize check artifacts/minilm-int8/1
      optimize check artifacts/minilm-int8/1 --require-signature public.pem
    """
    del store
    if is_bundle(recipe):
        if overrides:
            raise click.UsageError("--set belongs to a recipe, and this is a bundle.")
        options = {
            "--require-signature": require_signature,
            "--signature": signature,
            "--at-least": at_least,
        }
        words = [w for o, value in options.items() if value is not None for w in (o, str(value))]
        harness("check", recipe, tuple(words), obj["json"])
    if any(option is not None for option in (require_signature, signature, at_least)):
        raise click.UsageError(
            "--require-signature, --signature and --at-least belong to a bundle, and this is a "
            "recipe."
        )
    from optimizer.checks import checked
    from optimizer.data.datasets import check_header
    from optimizer.publish import stage
    from optimizer.recipe import file as recipe_file
    from optimizer.recipe.schema import data_specs
    from optimizer.targets import missing_packages

    resolved, lines = checked.read(recipe, overrides, fetch=False)
    missing_packages.check(resolved)
    with recipe_file.located(lines):
        places = stage.check(resolved.publish)
    for spec in data_specs(
        resolved.calibrate, resolved.validate_, resolved.reduce, resolved.qat, resolved.slo
    ).values():
        check_header(spec)
    names = [t.runtime for t in resolved.targets]
    if obj["json"]:
        show(resolved.model_dump_json(by_alias=True, indent=1))
    else:
        goes = f" Publishes to: {', '.join(map(str, places))}." if places else ""
        show(f"{one_line(str(recipe))}: fine. Targets: {', '.join(names)}.{goes}")
