"""Encrypt a bundle into one age file for its recipients, and decrypt it.

https://age-encryption.org/v1, by the package pyrage; `age --decrypt` reads the file too. Inside is
a plain tar with the folder `bundle` and its attachments (bundle.sig, ...). Decryption writes into a
private folder, and renames it once everything is authenticated, equal to its manifest and, with
`key`, signed. Anybody with a public key can seal for it; only a signature identifies the sender.
"""

from __future__ import annotations

import os
import tarfile
from pathlib import Path
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.bundle.signed import check_age
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.process.temporary import make_private_folder
from optimizer.harness.trust import signature, verify
from optimizer.harness.trust.archive import unpack
from optimizer.harness.trust.plain_file import open_regular, read
from optimizer.package.stage import strip_member
from optimizer.publish.attachments import ATTACHMENTS, attachment_path
from optimizer.publish.documents.sign import read_secret
from optimizer.publish.push import read_attachments

WORK = ".optimize-seal"
BUNDLE = "bundle"
LARGEST_KEYS = 1 << 20
SECRET_KEY = "AGE-SECRET-KEY-"
RECIPIENTS = "an age public key (age1...), or a file with one on each line"
IDENTITIES = "a file of age-keygen, with one secret key (AGE-SECRET-KEY-1...) on each line"


def seal(bundle: Path, recipients: tuple[str, ...], into: Path, *, replace: bool = False) -> Path:
    """Encrypt the folder `bundle` and its attachments into the file `into`, and return `into`.

    recipients: public keys or files of them; each key alone can open the file.
    replace: overwrite an existing file.

    Raises BundleError for a folder that differs from its manifest; RecipeError for an invalid
    recipient, and for a file inside the bundle or, without `replace`, an existing one.
    """
    pyrage = _pyrage()
    keys = [_recipient(pyrage, text) for recipient in recipients for text in _lines(recipient)]
    if os.path.isdir(into) or (os.path.lexists(into) and not replace):
        raise RecipeError(
            "a folder exists at this path"
            if os.path.isdir(into)
            else "a file exists at this path; --replace overwrites it",
            where=str(into),
            fix="Give another file: --to FILE.",
        )
    if not keys:
        raise RecipeError("no public key was given", where="--recipient", accepted=RECIPIENTS)
    read_manifest(bundle)
    _, differences = verify.list_problems(bundle)
    if differences:
        raise BundleError(f"it differs from its manifest: {differences[0]}", where=str(bundle))
    if into.resolve().is_relative_to(bundle.resolve()):
        raise RecipeError(
            "the file would lie inside the bundle", where=str(into), fix="Give another: --to FILE."
        )
    attached = [attachment_path(bundle, a) for a, _ in read_attachments(bundle) if a in ATTACHMENTS]
    with (
        atomic.explain_disk_errors(into, "--to"),
        make_private_folder(into.resolve().parent, WORK) as work,
    ):
        with tarfile.open(work / "tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for path in [bundle, *sorted(bundle.rglob("*"))]:
                name = Path("sealed", BUNDLE) / path.relative_to(bundle)
                archive.add(path, str(name), recursive=False, filter=strip_member)
            for file in attached:
                suffix = file.name.removeprefix(bundle.resolve().name)
                archive.add(file, f"sealed/{BUNDLE}{suffix}", filter=strip_member)
        with (work / "tar").open("rb") as clear, (work / "age").open("wb") as sealed:
            pyrage.encrypt_io(clear, sealed, keys)
        atomic.sync(work / "age")
        os.replace(work / "age", into)
        atomic.sync(into.resolve().parent)
    return into


def unseal(
    sealed: Path,
    identity: Path,
    into: Path,
    key: Path | None = None,
    at_least: str | None = None,
) -> str:
    """Decrypt the file `sealed` into the new private folder `into`.

    Returns the hint of the key that signed the bundle, or "" where `key` is None.

    identity: file with secret keys
    key: public key whose signature is required; None: no signature is required
    at_least: oldest accepted version of the bundle; None: any

    Raises BundleError, leaving nothing behind, for a file that is not sealed for these keys, was
    changed, or holds an invalid bundle.
    """
    pyrage = _pyrage()
    _refuse_secret(str(identity), "--identity", IDENTITIES)
    lines = _keys(identity, secret=True)
    identities = [_identity(pyrage, line, identity) for line in lines]
    if os.path.lexists(into):
        raise RecipeError(
            "this path exists already",
            where=str(into),
            fix="Move it away, or give another folder: --to FOLDER.",
        )
    with (
        atomic.explain_disk_errors(into, "--to"),
        make_private_folder(into.resolve().parent, WORK) as work,
    ):
        _decrypt(pyrage, sealed, identities, work / "tar")
        folder = unpack(work / "tar", work / "sealed")
        bundle = folder / BUNDLE
        if not bundle.is_dir():
            raise BundleError("the decrypted file is not a bundle", where=str(sealed))
        _, differences = verify.list_problems(bundle)
        if differences:
            raise BundleError(f"the bundle inside: {differences[0]}", where=str(sealed))
        manifest = read_manifest(bundle)
        hint = signature.require(bundle, key, signature.signature_path(bundle)) if key else ""
        if at_least is not None:
            check_age(manifest["version"], at_least, str(sealed))
        bundle.chmod(0o700)
        for attachment in ATTACHMENTS:
            file = attachment_path(bundle, attachment)
            if file.is_file():
                atomic.sync(file)
                os.replace(file, attachment_path(into, attachment))
        atomic.finish(bundle, into)
    return hint


def _decrypt(pyrage: Any, sealed: Path, identities: list[Any], into: Path) -> None:
    try:
        with open_regular(sealed) as source, into.open("wb") as target:
            pyrage.decrypt_io(source, target, identities)
    except (pyrage.DecryptError, OSError) as e:
        if getattr(e, "errno", None) is not None:  # an error of the disk; age sets no errno
            raise
        raise BundleError(
            f"it cannot be decrypted ({e})",
            where=str(sealed),
            accepted="a file sealed for one of these keys, and not changed since",
        ) from None


def _lines(recipient: str) -> list[str]:
    """Return the public keys of one recipient of a sealed bundle: one typed key, or the lines of a
    file."""
    _refuse_secret(recipient, "--recipient", RECIPIENTS)
    if recipient.startswith("age1"):
        return [recipient]
    return _keys(Path(recipient))


def _refuse_secret(text: str, option: str, accepted: str) -> None:
    """Raises RecipeError, without repeating the text, for a secret key typed as an option of
    sealing or opening a bundle."""
    if text.strip().upper().startswith(SECRET_KEY):
        raise RecipeError(
            "a secret key was typed",
            where=option,
            accepted=accepted,
            fix="The shell's history holds it now: make another key (age-keygen).",
        )


def _keys(path: Path, *, secret: bool = False) -> list[str]:
    """Read a file of age keys, which seal and open bundles, one per line; empty lines and comments
    (#) are skipped."""
    try:
        data = (read_secret if secret else read)(path, LARGEST_KEYS)
        lines = data.decode("ascii").splitlines()
    except (InputError, ValueError) as e:
        reason = e.problem if isinstance(e, InputError) else type(e).__name__
        raise RecipeError(
            f"the keys cannot be read ({reason})",
            where=str(path),
            accepted=f"{RECIPIENTS}; {IDENTITIES}",
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _recipient(pyrage: Any, text: str) -> Any:
    _refuse_secret(text, "--recipient", RECIPIENTS)
    try:
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError:
        raise RecipeError(
            f"{text!r:.80} is not a public key", where="--recipient", accepted=RECIPIENTS
        ) from None


def _identity(pyrage: Any, text: str, path: Path) -> Any:
    """Parse a secret key of age, by which a sealed bundle is opened. Messages do not repeat the
    line, which may hold a secret with a typo."""
    try:
        return pyrage.x25519.Identity.from_str(text)
    except pyrage.IdentityError:
        raise RecipeError(
            "a line is not a secret key", where=str(path), accepted=IDENTITIES, fix="age-keygen"
        ) from None


def _pyrage() -> Any:
    try:
        import pyrage
    except ImportError:
        raise MachineError(
            "pyrage is not installed",
            where="optimize seal",
            fix="pip install 'optimize-toolchain[seal]'",
        ) from None
    return pyrage
