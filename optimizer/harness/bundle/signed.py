"""The options that ask whose bundle it is, and how old it may be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import BundleError, InputError

NUMBERED = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)")
NUMBERS = "numbers with dots between them, e.g. 3 or 1.12.0"


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--require-signature",
        type=Path,
        metavar="KEY",
        help="refuse a bundle that the owner of this public key (PEM) did not sign",
    )
    command.add_argument(
        "--signature", type=Path, help="default: BUNDLE.sig, beside the folder or the tar"
    )
    command.add_argument(
        "--at-least", metavar="VERSION", help="refuse an older version of it, signed or not"
    )


def check(folder: Path, args: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Verify what the options ask for, before anything else in the bundle is opened.

    args: bundle, and what `add_options` adds. Raises as `signature.require` does; BundleError for
    an older version.
    """
    if args.require_signature is not None:
        from ..trust import signature

        bundle = Path(args.bundle or folder).resolve()
        file = args.signature or signature.beside(bundle)
        key = signature.require(folder, args.require_signature, file)
        say(f"signed by the key {key[:16]}...: every file is what was signed")
    elif args.signature is not None:
        raise InputError(
            "a signature was given, and no key to verify it with",
            where="--signature",
            fix="Give the public key too: --require-signature KEY.",
        )
    if args.at_least is not None:
        from .manifest import read_manifest

        check_age(read_manifest(folder)["version"], args.at_least, str(folder))


def check_age(version: str, least: str, where: str) -> None:
    """Raises BundleError for a version before `least`: an older bundle that its owner signed once
    is still signed. InputError where `least` is no version that has an order."""
    lowest = NUMBERED.fullmatch(least)
    if lowest is None:
        raise InputError(f"{least!r:.80} was given", where="--at-least", accepted=NUMBERS)
    numbered = NUMBERED.fullmatch(version)
    if numbered is None:
        raise BundleError(
            f"its version {version!r:.80} has no order", where=where, accepted=NUMBERS
        )
    if _numbers(numbered[1]) < _numbers(lowest[1]):
        raise BundleError(
            f"it is version {version}, older than {least}",
            where=where,
            fix="Get the newer one; who sends an old one may want its faults.",
        )


def _numbers(text: str) -> list[int]:
    """1.10 is after 1.9, and the same as 1.10.0."""
    numbers = [int(part) for part in text.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers
