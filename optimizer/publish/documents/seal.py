"""Encrypt a bundle into one file in the age format, for its recipients, and decrypt it.

https://age-encryption.org/v1, by the package pyrage; `age --decrypt` reads it too. Inside is a
plain tar of one folder: `bundle`, and its attachments (bundle.sig, ...). Decryption writes into a
folder that only this user may enter, and renames it after all of it was authenticated, compared
with its manifest and, where a key is required, found signed.
age authenticates 64 KiB at a time: plaintext before a changed byte is the sender's, but
not complete. Anybody with a public key can seal for it; only a signature identifies the sender.
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
from optimizer.harness.process.temporary import private_folder
from optimizer.harness.trust import signature, verify
from optimizer.harness.trust.archive import unpack
from optimizer.harness.trust.plain_file import open_regular, read
from optimizer.package.stage import plain_member
from optimizer.publish.attachments import ATTACHMENTS, beside
from optimizer.publish.documents.sign import read_secret
from optimizer.publish.push import attachments_of

WORK = ".optimize-seal"
BUNDLE = "bundle"
LARGEST_KEYS = 1 << 20
SECRET_KEY = "AGE-SECRET-KEY-"
RECIPIENTS = "public keys of age, age1...: typed, or a file with one on a line"
IDENTITIES = (
    "a file with secret keys of age, AGE-SECRET-KEY-1... on a line, as age-keygen writes it"
)


def seal(bundle: Path, recipients: tuple[str, ...], into: Path, *, replace: bool = False) -> Path:
    """Encrypt the folder `bundle` and its attachments into the file `into`.

    Any one of the recipients can open it. replace: let it take the place of a file. Raises
    BundleError for a folder that is not what its manifest says; RecipeError for what is not a
    recipient, and where the file is inside the bundle or, without `replace`, there already.
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
        raise RecipeError("there is none", where="--recipient", accepted=RECIPIENTS)
    read_manifest(bundle)
    _, differences = verify.problems(bundle)
    if differences:
        raise BundleError(f"not what its manifest says: {differences[0]}", where=str(bundle))
    if into.resolve().is_relative_to(bundle.resolve()):
        raise RecipeError("it is inside the bundle", where=str(into), fix="Name another place.")
    attached = [beside(bundle, a) for a, _ in attachments_of(bundle) if a in ATTACHMENTS]
    with (
        atomic.disk_errors_explained(into, "--to"),
        private_folder(into.resolve().parent, WORK) as work,
    ):
        with tarfile.open(work / "tar", "w", format=tarfile.PAX_FORMAT) as archive:
            for path in [bundle, *sorted(bundle.rglob("*"))]:
                name = Path("sealed", BUNDLE) / path.relative_to(bundle)
                archive.add(path, str(name), recursive=False, filter=plain_member)
            for file in attached:
                suffix = file.name.removeprefix(bundle.resolve().name)
                archive.add(file, f"sealed/{BUNDLE}{suffix}", filter=plain_member)
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
    """Decrypt into the new folder `into`, which only this user may enter; returns the hint of the
    key that signed it, or "".

    identity: a file with secret keys. key, at_least: as `pull` has them. Raises BundleError for a
    file that these keys do not open, that was changed, or whose content is not what it should be;
    nothing is left of it then.
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
        atomic.disk_errors_explained(into, "--to"),
        private_folder(into.resolve().parent, WORK) as work,
    ):
        _decrypt(pyrage, sealed, identities, work / "tar")
        folder = unpack(work / "tar", work / "sealed")
        bundle = folder / BUNDLE
        if not bundle.is_dir():
            raise BundleError("no sealed bundle", where=str(sealed))
        _, differences = verify.problems(bundle)
        if differences:
            raise BundleError(f"inside, {differences[0]}", where=str(sealed))
        manifest = read_manifest(bundle)
        hint = signature.require(bundle, key, signature.beside(bundle)) if key else ""
        if at_least is not None:
            check_age(manifest["version"], at_least, str(sealed))
        bundle.chmod(0o700)
        for attachment in ATTACHMENTS:
            file = beside(bundle, attachment)
            if file.is_file():
                atomic.sync(file)
                os.replace(file, beside(into, attachment))
        atomic.finish(bundle, into)
    return hint


def _decrypt(pyrage: Any, sealed: Path, identities: list[Any], into: Path) -> None:
    try:
        with open_regular(sealed) as source, into.open("wb") as target:
            pyrage.decrypt_io(source, target, identities)
    except (pyrage.DecryptError, OSError) as e:
        if getattr(e, "errno", None) is not None:  # of the disk; age's own have no number
            raise
        raise BundleError(
            f"it is not opened ({e})",
            where=str(sealed),
            accepted="a file that was sealed for one of these keys, and not changed since",
        ) from None


def _lines(recipient: str) -> list[str]:
    """A recipient that was typed, or those of a file."""
    _refuse_secret(recipient, "--recipient", RECIPIENTS)
    if recipient.startswith("age1"):
        return [recipient]
    return _keys(Path(recipient))


def _refuse_secret(text: str, option: str, accepted: str) -> None:
    """Raises RecipeError, which does not repeat it, for a secret key in place of a name."""
    if text.strip().upper().startswith(SECRET_KEY):
        raise RecipeError(
            "a secret key was given",
            where=option,
            accepted=accepted,
            fix="It stands in the shell's history now: make another (age-keygen).",
        )


def _keys(path: Path, *, secret: bool = False) -> list[str]:
    """The lines of a file of keys; those that begin with # are comments."""
    try:
        data = (read_secret if secret else read)(path, LARGEST_KEYS)
        lines = data.decode("ascii").splitlines()
    except (InputError, ValueError) as e:
        reason = e.problem if isinstance(e, InputError) else type(e).__name__
        raise RecipeError(
            f"no keys can be read ({reason})",
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
    """The line is not repeated in a message: it may be a secret with a typing error."""
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
