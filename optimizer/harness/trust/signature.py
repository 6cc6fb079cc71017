"""Verify the signature of a bundle, beside its folder, before anything in the bundle is opened.

The format is that of sigstore's model-signing 1.x with a key (https://github.com/sigstore/
model-transparency), whose own program verifies it too. FOLDER.sig is a sigstore bundle, UTF-8 JSON:

    mediaType             application/vnd.dev.sigstore.bundle.v0.3+json
    verificationMaterial  {publicKey: {hint: sha256 of the public key as PEM}, tlogEntries: []}
    dsseEnvelope          {payloadType, payload: base64, signatures: [{sig: base64, keyid: ""}]}

The signature is ECDSA over "DSSEv1 <length> <payloadType> <length> <payload>" with a key of NIST
P-256, P-384 or P-521 and SHA-256, -384 or -512. The payload is an in-toto statement:

    _type            https://in-toto.io/Statement/v1
    subject          [{name, digest: {sha256}}]: of the files' digests, as bytes, in their order
    predicateType    https://model_signing/signature/v1.0
    predicate        {resources: [{name, algorithm: sha256, digest}], serialization: {...}}

Every file of the folder, the manifest too, must be among the resources, and none may be a link;
files that `serialization` excludes are not ignored here. Needs the package cryptography.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BundleError, InputError, MachineError
from .plain_file import read
from .verify import list_entries, name_problem, parse

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
HASHES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""Hash by the name of a key's curve."""
KEYS = "a PEM file of an elliptic curve key: NIST P-256, P-384 or P-521"
MAKE = "Make one: openssl ecparam -name prime256v1 -genkey -noout -out private.pem; its public "
MAKE += "half: openssl ec -in private.pem -pubout -out public.pem"


def signature_path(bundle: Path) -> Path:
    """Return the path of the signature of a bundle's folder or tar."""
    return bundle.with_name(f"{bundle.name}.sig")


def require(folder: Path, key: Path, signature: Path) -> str:
    """Verify that a folder has exactly the files that a key signed; returns the key's digest.

    key: file of the public key

    Raises BundleError for a signature that is missing, of another key or of other files; InputError
    for a `key` that is not a public key; MachineError without the package cryptography.
    """
    public_key = load_public(key)
    if not signature.is_file():
        raise BundleError(
            "the bundle has no signature",
            where=str(signature),
            fix="Get it from the bundle's publisher, or name its file: --signature FILE.",
        )
    signed = verify_signed_files(read(signature), public_key, str(signature))
    differences = compare(folder, signed)
    if differences:
        raise BundleError(
            f"not what was signed: {', '.join(differences[:5])}"
            + (f" and {len(differences) - 5} more" if len(differences) > 5 else ""),
            where=str(folder),
            fix="Do not use it; get the bundle and its signature again.",
        )
    return digest_key(public_key)


def load_public(path: Path) -> Any:
    """Load a public key, by which bundles are verified, from a PEM file, as an object of the
    package cryptography.

    Raises InputError for another file, MachineError without the package.
    """
    serialization, _ = _cryptography()
    data = read(path)
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, TypeError) as e:
        raise InputError(f"not a key ({e})", where=str(path), accepted=KEYS, fix=MAKE) from None
    except Exception as e:  # cryptography raises its own for an unknown algorithm
        raise InputError(f"unknown kind of key ({e})", where=str(path), accepted=KEYS) from None
    check_curve(key, path)
    return key


def check_curve(key: Any, path: Path) -> None:
    """Raise InputError for a signing key whose curve is not in HASHES. path: the key's file, for
    errors."""
    name = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if name not in HASHES:
        raise InputError(f"a key of {name}", where=str(path), accepted=KEYS, fix=MAKE)


def algorithm(key: Any) -> Any:
    """Return, to verify a signature, ECDSA with the hash that belongs to a key's curve."""
    _, hashes = _cryptography()
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.ECDSA(getattr(hashes, HASHES[key.curve.name])())


def digest_key(public_key: Any) -> str:
    """Return the name of a key in a bundle's signature: the sha256 of the public key as PEM."""
    serialization, _ = _cryptography()
    pem: bytes = public_key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(pem).hexdigest()


def encode_payload(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Encode the bytes that an envelope's signature covers (pre-authentication encoding, DSSE)."""
    head = f"DSSEv1 {len(payload_type.encode())} {payload_type} {len(payload)} "
    return head.encode() + payload


def digest_subject(digests: list[str]) -> str:
    """Return the digest of the subject of a bundle's signed statement. digests: sha256 of the files
    in hex, in order"""
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


def verify_signed_files(data: bytes, public_key: Any, where: str) -> dict[str, str]:
    """Verify a bundle's signature and return the signed files, {name: sha256}.

    data: content of the signature's file
    public_key: object of the package cryptography
    where: the signature's file, for messages

    Raises BundleError for a signature that cannot be read, is another key's, or does not list a
    folder's files.
    """
    statement = open_envelope(data, public_key, where)
    try:
        resources = statement["predicate"]["resources"]
        (subject,) = statement["subject"]
        names = [r["name"] for r in resources]
        digests = [r["digest"] for r in resources]
        kinds = (statement["_type"], statement["predicateType"])
        if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
            raise ValueError(f"it is a statement of the kind {kinds[1]!r:.80}")
        if {r["algorithm"] for r in resources} - {"sha256"}:
            raise ValueError("a digest is not sha256")
        if wrong := [f"{n!r:.80} {why}" for n in names if (why := name_problem(n))]:
            raise ValueError(wrong[0])
        if len(set(names)) < len(names) or digest_subject(digests) != subject["digest"]["sha256"]:
            raise ValueError("its digests are not its subject's")
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise BundleError(
            f"the signed statement is not about a folder's files ({type(e).__name__}: {e})",
            where=where,
            accepted=f"a signature of the kind {PREDICATE_TYPE}",
        ) from None
    return dict(zip(names, digests, strict=True))


def open_envelope(data: bytes, public_key: Any, where: str) -> dict[str, Any]:
    """Verify the signature of a sigstore bundle and return its statement.

    data: content of the file
    where: the file, for messages

    Raises BundleError for a file that is not a sigstore bundle, and for another key's signature.
    """
    from cryptography.exceptions import InvalidSignature

    try:
        document = parse(data)
        if document["mediaType"] != MEDIA_TYPE:
            raise ValueError(f"mediaType {document['mediaType']!r:.80}")
        envelope = document["dsseEnvelope"]
        named = str(document["verificationMaterial"]["publicKey"].get("hint"))
        (signature,) = envelope["signatures"]
        payload = base64.b64decode(envelope["payload"], validate=True)
        written = base64.b64decode(signature["sig"], validate=True)
        payload_type = str(envelope["payloadType"])
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as e:
        raise BundleError(
            f"the signature cannot be read ({type(e).__name__}: {e})",
            where=where,
            accepted="what `optimize sign` or `model_signing sign key` writes",
        ) from None
    try:
        public_key.verify(written, encode_payload(payload, payload_type), algorithm(public_key))
    except InvalidSignature:
        ours = digest_key(public_key)
        other = f"is of the key {named:.16}..., not of the required {ours[:16]}..."
        raise BundleError(
            f"the signature {other if named != ours else 'does not match: its text was changed'}",
            where=where,
            fix="Do not use it; get the bundle and its signature again.",
        ) from None
    try:
        statement = parse(payload)
        if payload_type != PAYLOAD_TYPE or not isinstance(statement, dict):
            raise ValueError(f"payloadType {payload_type!r:.80}")
    except ValueError as e:
        raise BundleError(f"the signed payload is not a statement ({e})", where=where) from None
    return statement


def compare(folder: Path, signed: Mapping[str, str]) -> list[str]:
    """Return the differences between a bundle's folder and the signed files, one sentence each.

    signed: {name: sha256}
    """
    try:
        present = dict(list_entries(folder))
        differences = [f"{n} is missing" for n in sorted({*signed} - {*present})]
        for name, status in sorted(present.items()):
            if not stat.S_ISREG(status.st_mode):
                differences.append(f"{name} is a link, or not a plain file")
            elif name not in signed:
                differences.append(f"{name} was not signed")
            elif _sha256(folder / name) != signed[name]:
                differences.append(f"{name} has another digest")
    except OSError as e:
        raise BundleError(f"cannot be read ({e.strerror})", where=str(e.filename)) from None
    return differences


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _cryptography() -> tuple[Any, Any]:
    """Return the modules serialization and hashes of the package cryptography, which verifies
    signatures.

    Raises MachineError if it is not installed.
    """
    try:
        from cryptography.hazmat.primitives import hashes, serialization
    except ImportError:
        raise MachineError(
            "cryptography is not installed; signatures cannot be verified without it",
            where="--require-signature",
            fix="pip install cryptography",
        ) from None
    return serialization, hashes
