"""Tests of `seal` and `open`: only recipients decrypt a bundle, complete and verified."""

from __future__ import annotations

import io
import os
import random
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pyrage
import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.errors import RecipeError
from optimizer.harness.errors import BundleError
from optimizer.publish.attachments import SIGNATURE, attachment_path
from optimizer.publish.documents.seal import seal, unseal
from optimizer.publish.documents.sign import sign
from tests import killing
from tests.package.bundles import small_bundle
from tests.publish.servers.keys import write_keys

AGE = shutil.which("age")


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def device(folder: Path, name: str = "device") -> tuple[Path, str]:
    """Return a file with a secret key, as age-keygen writes it, and the public key."""
    identity = pyrage.x25519.Identity.generate()
    file = folder / f"{name}.key"
    file.write_text(f"# created: today\n# public key: x\n{identity}\n")
    return file, str(identity.to_public())


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_opened_is_what_was_sealed_and_only_its_user_may_enter(
    bundle: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    sign(bundle, private, attachment_path(bundle, SIGNATURE))
    first, second = device(tmp_path, "first"), device(tmp_path, "second")
    sealed = seal(bundle, (first[1], second[1]), tmp_path / "sealed.age")
    for identity, _ in (first, second):
        into = tmp_path / f"opened by {identity.stem}"
        assert unseal(sealed, identity, into, public)
        assert contents(into) == contents(bundle)
        assert stat.S_IMODE(into.stat().st_mode) == 0o700
        assert optimize("check", into, "--require-signature", public).exit_code == 0
    assert b"tokenizer" not in sealed.read_bytes()


def test_another_key_opens_nothing_and_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    _, recipient = device(tmp_path)
    other, _ = device(tmp_path, "other")
    work = tmp_path / "work"
    work.mkdir()
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    with pytest.raises(BundleError, match="cannot be decrypted"):
        unseal(sealed, other, work / "opened")
    assert list(work.iterdir()) == []


def test_a_changed_byte_or_a_cut_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    identity, recipient = device(tmp_path)
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    data = sealed.read_bytes()
    work = tmp_path / "work"
    work.mkdir()
    rng = random.Random(0)
    places = [0, 30, len(data) - 1, *(rng.randrange(len(data)) for _ in range(10))]
    damaged = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in places]
    damaged += [data[:i] for i in places] + [data + b"x", b""]
    for bad in damaged:
        sealed.write_bytes(bad)
        with pytest.raises(BundleError):
            unseal(sealed, identity, work / "opened")
        assert list(work.iterdir()) == []


def sealed_tar(recipient: str, members: dict[str, bytes], links: dict[str, str]) -> bytes:
    """Seal files, as anybody with the public key can."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for name in ("sealed", "sealed/bundle"):
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            archive.addfile(folder)
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
    return pyrage.encrypt(tar.getvalue(), [pyrage.x25519.Recipient.from_str(recipient)])


def test_anybody_can_seal_so_what_is_inside_is_not_trusted(bundle: Path, tmp_path: Path) -> None:
    identity, recipient = device(tmp_path)
    _, public = write_keys(tmp_path)
    inside = {f"sealed/bundle/{name}": data for name, data in contents(bundle).items()}
    work, file = tmp_path / "work", tmp_path / "sealed.age"
    work.mkdir()
    for members, links in (
        ({}, {}),
        ({**inside, "sealed/bundle/extra.py": b""}, {}),
        ({**inside, "sealed/bundle/LICENSE": b"changed"}, {}),
        ({**inside, "sealed/../../escaped": b""}, {}),
        (inside, {"sealed/bundle/link": "/etc/passwd"}),
    ):
        file.write_bytes(sealed_tar(recipient, members, links))
        with pytest.raises(BundleError):
            unseal(file, identity, work / "opened")
        assert list(work.iterdir()) == []
    file.write_bytes(sealed_tar(recipient, inside, {}))
    with pytest.raises(BundleError, match="no signature"):
        unseal(file, identity, work / "opened", public)
    with pytest.raises(BundleError, match="older than 2"):
        unseal(file, identity, work / "opened", at_least="2")
    assert list(work.iterdir()) == []
    unseal(file, identity, work / "opened")


def test_an_open_that_is_killed_leaves_no_bundle_and_the_next_one_clears_it(
    bundle: Path, tmp_path: Path
) -> None:
    identity, recipient = device(tmp_path)
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    for instant in range(5, 400, 80):
        work = tmp_path / str(instant)
        work.mkdir()
        pid = killing.start(
            lambda to=work / "opened": unseal(sealed, identity, to), instant, str(work)
        )
        assert killing.wait(pid) in (0, -9)
        if not (work / "opened").exists():
            unseal(sealed, identity, work / "opened")
        assert contents(work / "opened") == contents(bundle)
        assert [p.name for p in work.iterdir()] == ["opened"]


@pytest.mark.slow
@pytest.mark.skipif(AGE is None, reason="age is not on the PATH")
def test_age_itself_opens_it(bundle: Path, tmp_path: Path) -> None:
    identity, recipient = device(tmp_path)
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    command = [str(AGE), "--decrypt", "--identity", str(identity), str(sealed)]
    clear = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(clear)) as archive:
        names = {m.name for m in archive if m.isfile()}
    assert {f"sealed/bundle/{name}" for name in contents(bundle)} <= names


def test_invalid_keys_are_refused_and_a_secret_is_not_repeated(
    bundle: Path, tmp_path: Path
) -> None:
    identity, recipient = device(tmp_path)
    for bad in ("age1nothing", str(tmp_path / "none"), str(identity)):
        with pytest.raises(RecipeError):
            seal(bundle, (bad,), tmp_path / "sealed.age")
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    secret = identity.read_text().splitlines()[-1]
    identity.write_text(secret[:-1])
    with pytest.raises(RecipeError) as refused:
        unseal(sealed, identity, tmp_path / "opened")
    assert secret[:30] not in str(refused.value)


def test_existing_files_are_not_replaced(bundle: Path, tmp_path: Path) -> None:
    identity, recipient = device(tmp_path)
    sealed = seal(bundle, (recipient,), tmp_path / "sealed.age")
    (tmp_path / "mine").mkdir()
    with pytest.raises(RecipeError, match="exists already"):
        unseal(sealed, identity, tmp_path / "mine")
    with pytest.raises(RecipeError, match="inside the bundle"):
        seal(bundle, (recipient,), bundle / "x.age")


def test_the_commands_seal_and_open(whole_bundle: Path, tmp_path: Path) -> None:
    identity, recipient = device(tmp_path)
    recipients = tmp_path / "recipients.txt"
    recipients.write_text(f"# devices\n{recipient}\n")
    assert optimize("seal", whole_bundle, "--recipient", recipients).exit_code == 0
    result = optimize(
        *("open", f"{whole_bundle}.age", "--identity", identity, "--to", tmp_path / "opened")
    )
    assert result.exit_code == 0, result.stderr
    done = small_bundle.python(tmp_path / "opened", "-m", "harness", "predict", "a good film")
    assert done.returncode == 0
    assert os.listdir(tmp_path / "opened")
