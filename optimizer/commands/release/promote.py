"""The commands `optimize promote`, `optimize rollback` and `optimize prune`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.commands.release.publish import Access, opened, with_registry
from optimizer.foundation.progress import show

if TYPE_CHECKING:
    from optimizer.publish.environments.environments import Move


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option("--to", "environment", required=True, help="The environment, e.g. production.")
@click.option(
    "--require-signature",
    "key",
    type=click.Path(path_type=Path),
    metavar="KEY",
    help="Refuse a bundle that the owner of this public key (PEM) did not sign.",
)
@click.option(
    "--without-comparison",
    is_flag=True,
    help="Do not ask whether it is worse than what is there.",
)
@with_registry
@click.pass_obj
def promote(
    obj: dict[str, bool],
    address: str,
    environment: str,
    key: Path | None,
    without_comparison: bool,
    access: Access,
) -> None:
    """Let an environment, which is a tag, name the published bundle at ADDRESS. Refused: a bundle
    that is worse than what is there by the paired test on the results for each example (exit 3), or
    of which that cannot be told (exit 4); one without the required signature (exit 2).

    \b
    Examples:
      optimize promote oci://localhost:5000/minilm:2 --to production
      optimize promote file:///srv/minilm:2 --to production --require-signature public.pem
      optimize pull oci://localhost:5000/minilm:production
    """
    from optimizer.publish.environments.environments import promote as change

    with opened(address, access) as (parsed, place):
        done = change(place, parsed, environment, key=key, compared=not without_comparison)
    _show(done, obj["json"])


@click.command()
@with_debug_and_json
@click.argument("address")
@click.option("--from", "environment", required=True, help="The environment, e.g. production.")
@click.option(
    "--of",
    default="",
    metavar="TAG",
    help="Only if it names this version (or digest): running it again then changes nothing.",
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
    """Let an environment at ADDRESS name what it named before.

    \b
    Examples:
      optimize rollback oci://localhost:5000/minilm --from production
      optimize rollback oci://localhost:5000/minilm --from production --of 2
    """
    from optimizer.publish.environments.environments import rollback as change

    with opened(address, access) as (_, place):
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
    "--keep", type=click.IntRange(1), required=True, help="So many versions, those tagged last."
)
@click.option("--delete", is_flag=True, help="Do it; without this it only says what would go.")
@click.pass_obj
def prune(obj: dict[str, bool], address: str, keep: int, delete: bool) -> None:
    """Remove old versions from the layout or the store at ADDRESS, and the files that no other
    version names. What an environment names, and what a rollback would name, stays.

    \b
    Examples:
      optimize prune file:///srv/minilm --keep 5
      optimize prune s3://releases/minilm --keep 5 --delete
    """
    from contextlib import closing

    from optimizer.publish.address import parse
    from optimizer.publish.environments.prune import prune as remove
    from optimizer.publish.registries.places import prunable

    with closing(prunable(parse(address))) as place:
        pruned = remove(place, keep, delete=delete)
    verb = "removed" if delete else "would be removed (--delete)"
    names = ", ".join(pruned.versions) or "no version"
    text = f"{names}: {pruned.blobs} files, {pruned.size:,} bytes {verb}"
    document = {"exit_code": 0, "deleted": delete, **vars(pruned)}
    show(json.dumps(document) if obj["json"] else text)
