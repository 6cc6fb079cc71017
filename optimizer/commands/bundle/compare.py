"""Command `optimize compare`, alias `optimize diff`."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING

import click

from optimizer.commands.options import with_debug_and_json
from optimizer.commands.release.publish import Access, open_place, with_registry
from optimizer.foundation.progress import show

if TYPE_CHECKING:
    from optimizer.commands.bundle.look import Description


@click.command()
@with_debug_and_json
@click.argument("a")
@click.argument("b")
@with_registry
@click.pass_obj
def compare(obj: dict[str, bool], a: str, b: str, access: Access) -> None:
    """Compare bundles A and B.

    Shows quality, speed, size and recipe, and ends in a sentence per gate: better, worse or cannot
    be told, by how much and with which interval. Quality is compared by a paired test on the
    examples that both answered, time by the ratios to float, each measured in one run. A and B are
    folders or addresses, from which only the manifest and the report are fetched. The exit code is
    0 whatever the difference.

    \b
    Examples:
      optimize compare artifacts/minilm-int8/1 artifacts/minilm-int8/2
      optimize diff oci://localhost:5000/minilm:production artifacts/minilm-int8/2
      optimize diff s3://releases/minilm:1 s3://releases/minilm:2
    """
    from optimizer.commands.bundle import look

    document = look.compare(_describe(a, access), _describe(b, access))
    width = get_terminal_size((100, 24)).columns
    show(json.dumps(document, indent=1) if obj["json"] else look.compare_text(document, width))


def _describe(bundle: str, access: Access) -> Description:
    from optimizer.commands.bundle import look
    from optimizer.harness.errors import BundleError
    from optimizer.harness.process.temporary import make_temporary_folder
    from optimizer.publish.address import is_address
    from optimizer.publish.pull import pull_description

    if not is_address(bundle):
        return look.describe(Path(bundle))
    with open_place(bundle, access) as (address, place), make_temporary_folder("compare") as folder:
        pull_description(place, address, folder)
        try:
            return look.describe(folder, bundle, whole=False)
        except BundleError as e:  # its `where` is the temporary folder
            raise BundleError(e.problem, where=bundle, accepted=e.accepted, fix=e.fix) from None
