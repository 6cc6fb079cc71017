"""Tests of signatures: they cover every byte of a bundle, and sigstore's model-signing agrees."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.foundation.errors import RecipeError
from optimizer.harness.bundle.manifest import digest
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.trust import signature
from optimizer.publish.documents import sign
from tests.package.bundles import small_bundle
from tests.publish.servers.keys import CURVES, write_keys

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
JUDGE = shutil.which("model_signing")


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def with_signature(bundle: Path) -> tuple[Path, Path, Path]:
    private, public = write_keys(bundle.parent)
    file = signature.signature_path(bundle)
    sign.sign(bundle, private, file)
    return bundle, public, file


@pytest.fixture
def signed(bundle: Path) -> tuple[Path, Path, Path]:
    """Return a bundle, the public key, and the signature."""
    return with_signature(bundle)


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    """Make the folder that model-signing 1.1.1 signed in tests/golden/model_signing.sig."""
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_bytes(b"one\n")
    (folder / "sub" / "b.bin").write_bytes(b"\0\1\2")
    return folder


def verified(folder: Path) -> str:
    return signature.require(folder, GOLDEN / "model_signing.pub", GOLDEN / "model_signing.sig")


def test_what_the_other_project_signed_is_verified(golden: Path) -> None:
    assert verified(golden).startswith("6f3a463819f19d22")


@pytest.mark.parametrize("name", ["new.txt", ".gitignore", ".git/config", "sub/.x"])
def test_a_file_that_was_not_signed_is_refused_also_one_that_git_would_own(
    golden: Path, name: str
) -> None:
    (golden / name).parent.mkdir(exist_ok=True)
    (golden / name).touch()
    with pytest.raises(BundleError, match=f"{name} was not signed"):
        verified(golden)


@pytest.mark.slow
@pytest.mark.skipif(JUDGE is None, reason="model_signing (with pyopenssl) is not on the PATH")
@pytest.mark.parametrize("curve", CURVES)
def test_the_other_project_verifies_what_is_signed_here(
    bundle: Path, tmp_path: Path, curve: str
) -> None:
    private, public = write_keys(tmp_path, curve=curve)
    sign.sign(bundle, private, signature.signature_path(bundle))
    command: list[Any] = [JUDGE, "verify", "key", bundle, "--public_key", public]
    command += ["--signature", signature.signature_path(bundle)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    right = subprocess.run(command, env=environment, capture_output=True, text=True)
    (bundle / "LICENSE").write_text("Changed.\n")
    wrong = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (right.returncode, wrong.returncode) == (0, 1), right.stderr + wrong.stdout


@pytest.mark.slow
@pytest.mark.skipif(JUDGE is None, reason="model_signing (with pyopenssl) is not on the PATH")
def test_what_the_other_project_signs_is_verified_here(bundle: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    file = signature.signature_path(bundle)
    command: list[Any] = [JUDGE, "sign", "key", bundle, "--private_key", private]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    subprocess.run([*command, "--signature", file], env=environment, check=True)
    assert signature.require(bundle, public, file)


@pytest.mark.parametrize("curve", CURVES)
def test_a_bundle_that_is_signed_is_verified(bundle: Path, tmp_path: Path, curve: str) -> None:
    private, public = write_keys(tmp_path, curve=curve)
    assert optimize("sign", bundle, "--key", private).exit_code == 0
    checked = optimize("check", bundle, "--require-signature", public)
    assert (checked.exit_code, "signed by the key" in checked.stderr) == (0, True)


def test_each_file_that_is_changed_or_missing_is_refused(
    signed: tuple[Path, Path, Path],
) -> None:
    bundle, public, file = signed
    names = [p for p in sorted(bundle.rglob("*")) if p.is_file()]
    assert len(names) > 30
    for path in names:
        before = path.read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]) if before else b"x")
        with pytest.raises(BundleError, match="has another digest"):
            signature.require(bundle, public, file)
        path.unlink()
        with pytest.raises(BundleError, match="is missing"):
            signature.require(bundle, public, file)
        path.write_bytes(before)
    assert signature.require(bundle, public, file)


def test_each_field_of_the_manifest_is_signed_though_its_digest_is_computed_again(
    signed: tuple[Path, Path, Path],
) -> None:
    bundle, public, file = signed
    before = (bundle / "manifest.json").read_bytes()
    fields = [f for f in json.loads(before) if f not in ("digest", "content_digest")]
    assert len(fields) > 10
    for field in fields:
        manifest = json.loads(before) | {field: "another"}
        manifest["digest"] = digest(manifest)
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(BundleError, match=r"manifest\.json has another digest"):
            signature.require(bundle, public, file)
        (bundle / "manifest.json").write_bytes(before)


ADDED: dict[str, Callable[[Path], object]] = {
    "notes.txt was not signed": lambda b: (b / "notes.txt").touch(),
    "harness/json.py was not signed": lambda b: (b / "harness/json.py").touch(),
    "link is a link": lambda b: (b / "link").symlink_to("LICENSE"),
    "LICENSE is a link": lambda b: [
        (b / "LICENSE").rename(b.parent / "elsewhere"),
        (b / "LICENSE").symlink_to(b.parent / "elsewhere"),
    ],
    "model is a link": lambda b: [
        (b / "model").rename(b.parent / "models"),
        (b / "model").symlink_to(b.parent / "models"),
    ],
    "pipe is a link, or not a plain file": lambda b: os.mkfifo(b / "pipe"),
}


@pytest.mark.parametrize("message", ADDED)
def test_what_was_added_or_became_a_link_is_refused(
    signed: tuple[Path, Path, Path], message: str
) -> None:
    bundle, public, file = signed
    ADDED[message](bundle)
    with pytest.raises(BundleError, match=message):
        signature.require(bundle, public, file)


def changed(file: Path, change: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Change a signature's document and its statement, and write them back."""
    document = json.loads(file.read_bytes())
    envelope = document["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    before = json.dumps(statement)
    change(document, statement)
    if json.dumps(statement) != before:
        envelope["payload"] = base64.b64encode(json.dumps(statement).encode()).decode()
    file.write_text(json.dumps(document))


STATEMENTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "another payloadType": lambda d, s: d["dsseEnvelope"].update(payloadType="text/plain"),
    "one file fewer": lambda d, s: s["predicate"]["resources"].pop(),
    "another digest": lambda d, s: s["predicate"]["resources"][0].update(digest="00" * 32),
    "another subject": lambda d, s: s["subject"][0].update(name="other"),
    "no signature": lambda d, s: d["dsseEnvelope"].update(signatures=[]),
    "two signatures": lambda d, s: d["dsseEnvelope"]["signatures"].append({"sig": ""}),
    "an empty signature": lambda d, s: d["dsseEnvelope"]["signatures"][0].update(sig=""),
    "another mediaType": lambda d, s: d.update(mediaType="application/json"),
    "no envelope": lambda d, s: d.pop("dsseEnvelope"),
}


@pytest.mark.parametrize("change", STATEMENTS)
def test_a_signature_that_was_changed_is_refused(
    signed: tuple[Path, Path, Path], change: str
) -> None:
    bundle, public, file = signed
    changed(file, STATEMENTS[change])
    with pytest.raises(BundleError):
        signature.require(bundle, public, file)


def test_a_statement_of_another_kind_is_refused_though_the_key_signed_it(
    bundle: Path, tmp_path: Path
) -> None:
    private, public = write_keys(tmp_path)
    statement = sign.build_statement(bundle) | {"predicateType": "https://slsa.dev/provenance/v1"}
    file = tmp_path / "other.sig"
    file.write_bytes(sign.sign_statement(statement, sign.load_private(private)))
    with pytest.raises(BundleError, match="not about a folder's files"):
        signature.require(bundle, public, file)


@pytest.mark.parametrize("command", ["check", "predict", "bench"])
@pytest.mark.parametrize("why", ["stripped", "another key", "another file"])
def test_no_command_opens_a_bundle_that_the_key_did_not_sign(
    signed: tuple[Path, Path, Path], tmp_path: Path, command: str, why: str
) -> None:
    """The signature check refuses first, before the damage is found."""
    bundle, public, file = signed
    if why == "stripped":
        file.unlink()
    elif why == "another key":
        _, public = write_keys(tmp_path, "other")
    else:
        small_bundle.edited(bundle, lambda m: m.update(licence="mit"))
        (bundle / "tokenizer" / "tokenizer.json").write_text("{")
    result = optimize("--json", command, bundle, "--require-signature", public)
    reasons = {
        "stripped": "no signature",
        "another key": "is of the key",
        "another file": "not what was signed: manifest.json has another digest, tokenizer",
    }
    document = json.loads(result.stdout)
    assert (result.exit_code, reasons[why] in document["found"]) == (2, True), document


def test_the_harness_in_a_bundle_verifies_too(whole_bundle: Path) -> None:
    bundle, public, _ = with_signature(whole_bundle)
    words = ("-m", "harness", "predict", "a good film", "--require-signature", str(public))
    done = small_bundle.python(bundle, *words)
    assert (done.returncode, "signed by the key" in done.stderr) == (0, True), done.stderr
    (bundle / "notes.txt").touch()
    done = small_bundle.python(bundle, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "notes.txt was not signed" in done.stderr


def test_the_tar_of_a_signed_bundle_is_verified(whole_bundle: Path, packaged: Path) -> None:
    _, public, file = with_signature(whole_bundle)
    (tar,) = packaged.glob("*.tar")
    result = optimize("check", tar, "--require-signature", public, "--signature", file)
    assert result.exit_code == 0, result.stderr


def test_without_cryptography_the_message_says_what_to_install(
    signed: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    bundle, public, _ = signed
    hidden = tmp_path / "cryptography.py"
    hidden.write_text("raise ImportError('not here')")
    done = subprocess.run(
        [sys.executable, "-m", "optimizer", "check", bundle, "--require-signature", public],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "pip install cryptography" in done.stderr) == (5, True), done.stderr


@pytest.mark.parametrize("what", ["nothing", "text", "private", "ed25519", "another curve"])
def test_an_invalid_key_is_named(
    signed: tuple[Path, Path, Path], tmp_path: Path, what: str
) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    bundle, _, file = signed
    path = tmp_path / "key"
    pem = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    if what == "text":
        path.write_text("no key\n")
    elif what == "private":
        path = tmp_path / "own.pem"
    elif what == "ed25519":
        path.write_bytes(ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(*pem))
    elif what == "another curve":
        path.write_bytes(ec.generate_private_key(ec.SECP256K1()).public_key().public_bytes(*pem))
    with pytest.raises(InputError):
        signature.require(bundle, path, file)


def test_a_damaged_bundle_is_not_signed(bundle: Path, tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path)
    (bundle / "LICENSE").write_text("Changed.\n")
    result = optimize("sign", bundle, "--key", private)
    assert (result.exit_code, signature.signature_path(bundle).exists()) == (2, False)


def test_a_signature_is_not_written_into_the_bundle(bundle: Path, tmp_path: Path) -> None:
    private, _ = write_keys(tmp_path)
    with pytest.raises(RecipeError, match="an unsigned file"):
        sign.sign(bundle, private, bundle / "model.sig")


AGES = [("3", "3", 0), ("3", "2.9", 0), ("1.10", "1.9", 0), ("v2", "2.0", 0), ("2", "3", 2)]
AGES += [("1.9", "1.10", 2), ("nightly", "1", 2), ("1", "new", 2)]


@pytest.mark.parametrize(("version", "least", "code"), AGES)
def test_an_older_version_is_refused_though_it_is_signed(
    bundle: Path, tmp_path: Path, version: str, least: str, code: int
) -> None:
    private, public = write_keys(tmp_path)
    small_bundle.edited(bundle, lambda m: m.update(version=version))
    assert optimize("sign", bundle, "--key", private).exit_code == 0
    asked = ("--require-signature", public, "--at-least", least)
    result = optimize("check", bundle, *asked)
    assert result.exit_code == code, result.stderr


def test_a_signature_without_a_key_to_verify_it_is_refused(bundle: Path) -> None:
    result = optimize("check", bundle, "--signature", "x.sig")
    assert (result.exit_code, "--require-signature KEY" in result.stderr) == (2, True)
