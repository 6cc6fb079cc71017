"""Open the bundle that a command line names: unpack a tar, verify it, open it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from ..bundle import signed
from ..errors import BundleError

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle

Say = Callable[[str], None]


def find_verified(args: argparse.Namespace, stack: ExitStack, say: Say) -> Path:
    """Return the folder of a command's bundle, after checking signature and version as the options
    require."""
    folder = _folder(args.bundle, stack)
    signed.check(folder, args, say)
    return folder


def _folder(bundle: Path | None, stack: ExitStack) -> Path:
    """Return the folder of a command's bundle. A tar is unpacked into a temporary folder that
    `stack` removes.

    bundle: folder or tar; None: the bundle that contains this file
    """
    folder = bundle if bundle is not None else Path(__file__).parents[2]
    try:
        plain = folder.is_file()
    except (OSError, ValueError) as e:
        raise BundleError(f"cannot be read ({e})", where=f"{str(folder)[:200]}") from None
    if not plain:
        return folder
    from ..process.temporary import make_temporary_folder
    from ..trust.archive import unpack

    return unpack(folder, stack.enter_context(make_temporary_folder("bundle")) / "bundle")


def open_bundle(
    folder: Path, args: argparse.Namespace, say: Say, workers: int = 1, lookup: int = 0
) -> Bundle:
    """Open the bundle in a folder with the options of a command.

    say: receives lines about skipped and built engines
    workers: concurrent runs of a server
    lookup: maximum guessed tokens per step of prompt lookup; 0: none
    """
    from ..bundle.bundle import Bundle

    return Bundle(
        folder,
        runtime=args.runtime,
        threads=args.threads,
        workers=workers,
        say=say,
        genai=args.genai,
        prompt_lookup=lookup,
        cache=args.cache,
        prompt=getattr(args, "prompt", None),
        adapter=getattr(args, "adapter", None),
        embedding_type=getattr(args, "embedding_type", None),
        dimensions=getattr(args, "dimensions", None),
    )


def make_opener(args: argparse.Namespace, say: Say) -> Callable[[Path | None, ExitStack], Bundle]:
    """Return the function by which the command `serve` opens bundles.

    It maps (path or None, stack) to a Bundle, which the stack closes.

    args: options of `serve`
    """
    from ..bundle.manifest import read_manifest
    from ..server.options import choose_settings

    def open_at(path: Path | None, stack: ExitStack) -> Bundle:
        """Verify and open the bundle at a path; a link is resolved once for both."""
        place = None if path is None else path.resolve()
        named = argparse.Namespace(**{**vars(args), "bundle": place})
        if path != args.bundle:
            named.signature = None  # --signature belongs to the first bundle
        folder = find_verified(named, stack, say)
        workers = choose_settings(read_manifest(folder), args).workers
        return stack.enter_context(open_bundle(folder, args, say, workers))

    return open_at
