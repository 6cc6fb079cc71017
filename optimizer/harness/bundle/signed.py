"""Options that require a signature or a least version of a bundle, and their checks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import BundleError, InputError

NUMBERED = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)")
NUMBERS = "numbers with dots between them, e.g. 3 or 1.12.0"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add --require-signature, --signature and --at-least to a command that opens a bundle."""
    command.add_argument(
        "--require-signature",
        type=Path,
        metavar="KEY",
        help="refuse a bundle that is not signed with the private half of this public key (PEM)",
    )
    command.add_argument(
        "--signature", type=Path, help="file of the signature; default: BUNDLE.sig"
    )
    command.add_argument(
        "--at-least", metavar="VERSION", help="refuse a bundle of an older version, signed or not"
    )


def check(folder: Path, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Check signature and version of a bundle as the options require, before it is opened.

    folder: folder of the bundle
    args: `bundle`, and the options of `add_options`
    say: receives a line about the signature

    Raises the errors of `signature.require`; BundleError for an older version.
    """
    if args.require_signature is not None:
        from ..trust import signature

        bundle = Path(args.bundle or folder).resolve()
        file = args.signature or signature.signature_path(bundle)
        key = signature.require(folder, args.require_signature, file)
        say(f"signed by the key {key[:16]}...: all files match the signature")
    elif args.signature is not None:
        raise InputError(
            "a signature was given without a key",
            where="--signature",
            fix="Give the public key too: --require-signature KEY.",
        )
    if args.at_least is not None:
        from .manifest import read_manifest

        check_age(read_manifest(folder)["version"], args.at_least, str(folder))


def check_age(version: str, least: str, where: str) -> None:
    """Raise BundleError for a bundle's version below `least`, because an old signed bundle stays
    signed. Raises InputError if `least` is not a version number."""
    lowest = NUMBERED.fullmatch(least)
    if lowest is None:
        raise InputError(f"{least!r:.80} was given", where="--at-least", accepted=NUMBERS)
    numbered = NUMBERED.fullmatch(version)
    if numbered is None:
        raise BundleError(
            f"its version {version!r:.80} cannot be compared", where=where, accepted=NUMBERS
        )
    if _numbers(numbered[1]) < _numbers(lowest[1]):
        raise BundleError(
            f"it is version {version}, older than {least}",
            where=where,
            fix="Get the newer one. An old bundle may be sent to exploit its faults.",
        )


def _numbers(text: str) -> list[int]:
    """Parse a bundle's version to its numbers, without zeros at the end: 1.10 is above 1.9, equal
    to 1.10.0."""
    numbers = [int(part) for part in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
