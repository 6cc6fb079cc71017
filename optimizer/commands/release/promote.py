"""Commands `optimize promote`, `optimize rollback` and `optimize prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optimizer.commands.options import with_debug_and_json, with_key
from optimizer.commands.release.publish import Access, open_place, with_registry
from optimizer.foundation.progress import show

if TYPE_CHECKING:
    from optimizer.publish.environments.environments import Move


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option("--to", "environment", required=True, help="Environment to move, e.g. production.")
@with_key
@click.option(
    "--without-comparison",
    is_flag=True,
    help="Skip the comparison with the bundle that the environment names now.",
)
@click.option(
    "--new-model",
    is_flag=True,
    help="Accept another model or task than that of the bundle that the environment names now.",
)
@with_registry
@click.pass_obj
def promote(
    obj: dict[str, bool],
    address: str,
    environment: str,
    key: Path | None,
    without_comparison: bool,
    new_model: bool,
    access: Access,
) -> None:
    """Point an environment at a published bundle.

    An environment is a tag such as production. The bundle at ADDRESS is compared with the one that
    the environment has. Refused: a bundle of another model (exit 2), one without the required
    signature (exit 2), one that a paired test on the same examples finds worse (exit 3), and one on
    which that test cannot decide (exit 4).

    \b
    Examples:
      optimize promote oci://localhost:5000/minilm:2 --to production
      optimize promote file:///srv/minilm:2 --to production --require-signature public.pem
      optimize pull oci://localhost:5000/minilm:production
    """
    from optimizer.publish.environments.environments import promote as change

    with open_place(address, access) as (parsed, place):
        done = change(
            place,
            parsed,
            environment,
            key=key,
            compared=not without_comparison,
            new_model=new_model,
        )
    _show(done, obj["json"])


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option(
    "--from", "environment", required=True, help="Environment to move back, e.g. production."
)
@click.option(
    "--of",
    default="",
    metavar="TAG",
    help="Only if the environment names this version or digest now, so that a rerun changes "
    "nothing.",
)
@with_registry
@click.pass_obj
def rollback(
    obj: dict[str, bool],
    address: str,
    environment: str,
    of: str,
    access: Access,
) -> None:
    """Point an environment back to its last bundle.

    \b
    Examples:
      optimize rollback oci://localhost:5000/minilm --from production
      optimize rollback oci://localhost:5000/minilm --from production --of 2
    """
    from optimizer.publish.environments.environments import rollback as change

    with open_place(address, access) as (_, place):
        done = change(place, environment, of)
    _show(done, obj["json"])


def _show(done: Move, as_json: bool) -> None:
    comparisons = [vars(c) for c in done.comparisons]
    lines = [c.message for c in done.comparisons]
    now = "names" if done.before == done.after else "now names"
    lines.append(f"{done.environment} {now} {done.after}")
    if done.before and done.before != done.after:
        lines.append(f"before: {done.before}")
    document = {"exit_code": 0, **vars(done), "comparisons": comparisons}
    show(json.dumps(document) if as_json else "\n".join(lines))


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option(
    "--keep",
    type=click.IntRange(1),
    required=True,
    help="Number of versions to keep: those tagged last.",
)
@click.option(
    "--delete", is_flag=True, help="Delete; without this, only list what would be deleted."
)
@click.pass_obj
def prune(obj: dict[str, bool], address: str, keep: int, delete: bool) -> None:
    """Remove old versions at ADDRESS.

    ADDRESS is a layout or an object store. Files that only these versions use are removed too;
    versions that an environment names, or that a rollback would name, are kept.

    \b
    Examples:
      optimize prune file:///srv/minilm --keep 5
      optimize prune s3://releases/minilm --keep 5 --delete
    """
    from contextlib import closing

    from optimizer.publish.address import parse
    from optimizer.publish.environments.prune import prune as remove
    from optimizer.publish.registries.places import make_prunable

    with closing(make_prunable(parse(address))) as place:
        pruned = remove(place, keep, delete=delete)
    verb = "removed" if delete else "would be removed (--delete)"
    names = ", ".join(pruned.versions) or "no version"
    text = f"{names}: {pruned.blobs} files, {pruned.size:,} bytes {verb}"
    document = {"exit_code": 0, "deleted": delete, **vars(pruned)}
    show(json.dumps(document) if obj["json"] else text)
