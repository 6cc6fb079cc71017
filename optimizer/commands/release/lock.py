"""Command `optimize lock`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from optimizer.commands.options import lock_beside, with_recipe
from optimizer.foundation.progress import show
from optimizer.shared_store import Root


@click.command()
@with_recipe
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="File to write.  [default: RECIPE.lock.json, beside the recipe]",
)
@click.option(
    "--check",
    "against",
    type=click.Path(path_type=Path),
    metavar="LOCK",
    help="Compare with this lock, or a bundle's manifest.json, and write nothing; exit 2 if "
    "anything differs.",
)
@click.pass_obj
def lock(
    obj: dict[str, bool],
    recipe: Path,
    overrides: tuple[str, ...],
    store: Root,
    out: Path | None,
    against: Path | None,
) -> None:
    """Write a lock of RECIPE.

    A lock has the recipe with every default, the digests of the checkpoint's files and of the
    data's rows, and the versions of the packages.

    \b
    Examples:
      optimize lock recipes/minilm-int8.yaml
      optimize lock recipes/minilm-int8.yaml --check recipes/minilm-int8.lock.json
      optimize lock recipes/minilm-int8.yaml --check artifacts/minilm-int8/1/manifest.json
    """
    del store
    from optimizer import checks
    from optimizer.foundation import atomic
    from optimizer.package import lock as locks
    from optimizer.recipe import file as recipe_file

    resolved, lines = checks.read(recipe, overrides, fetch=True, lock=against, until="load")
    if against is not None:
        document = {"exit_code": 0, "differences": []}
        show(json.dumps(document) if obj["json"] else f"{recipe}: agrees with {against}")
        return
    with recipe_file.locate_errors(lines):
        now = locks.lock(resolved)
    file = out or lock_beside(recipe)
    text = json.dumps(now, indent=1, sort_keys=True)
    with atomic.explain_disk_errors(file, "--out"):
        atomic.write(file, text.encode())
    show(json.dumps({"exit_code": 0, "lock": str(file)}) if obj["json"] else str(file))
