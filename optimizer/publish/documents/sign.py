"""Sign a bundle with a private key, in the format of sigstore's model-signing.

harness/trust/signature.py describes the format and verifies it.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.foundation.progress import say
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.trust import plain_file, signature, verify
from optimizer.store import digest_file

Json = dict[str, Any]


def sign(bundle: Path, key: Path, into: Path) -> str:
    """Write the signature of a bundle's folder to `into`, and return the key's hint.

    key: the private key, a PEM file without a passphrase.

    Nothing is written into the bundle. Raises BundleError for a folder that differs from its
    manifest, RecipeError for an invalid key, MachineError without the package cryptography.
    """
    private_key = load_private(key)
    _, differences = verify.list_problems(bundle)
    if differences:
        raise BundleError(
            f"not signed, because it differs from its manifest: {differences[0]}",
            where=str(bundle),
            fix="Package the model again: optimize RECIPE.",
        )
    if os.path.lexists(into) and not _is_signature(into):
        raise RecipeError(
            "the file exists and is not a signature; it is not replaced",
            where=str(into),
            fix="Give another file: --signature FILE.",
        )
    if into.resolve().is_relative_to(bundle.resolve()):
        raise RecipeError(
            "the signature would be an unsigned file inside the bundle",
            where=str(into),
            fix=f"Leave out --signature to write it to {signature.signature_path(bundle)}.",
        )
    atomic.write(into, sign_statement(build_statement(bundle), private_key))
    return signature.digest_key(private_key.public_key())


def _is_signature(path: Path) -> bool:
    try:
        return bool(verify.parse(plain_file.read(path))["mediaType"] == signature.MEDIA_TYPE)
    except (InputError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_secret(path: Path, largest: int = verify.LARGEST) -> bytes:
    """Read the secret key's file with which a bundle is signed or opened; print a warning if other
    users may read the file."""
    return plain_file.read_secret(path, lambda m: say(f"warning: {m}"), largest, shared=True)


def load_private(path: Path) -> Any:
    """Return the private key in a PEM file, with which bundles are signed; print a warning if other
    users may read the file."""
    try:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ImportError:
        raise MachineError(
            "cryptography is not installed",
            where="optimize sign",
            fix="pip install 'optimize-toolchain[sign]'",
        ) from None
    try:
        key = load_pem_private_key(read_secret(path), None)
    except TypeError:
        raise RecipeError(
            "the key has a passphrase",
            where=str(path),
            accepted="a private key without a passphrase",
            fix=f"Write one where only you may read it: openssl ec -in {path} -out KEY.",
        ) from None
    except ValueError as e:
        raise RecipeError(
            f"not a private key ({e})",
            where=str(path),
            accepted=signature.KEYS,
            fix=signature.MAKE,
        ) from None
    signature.check_curve(key, path)
    return key


def build_statement(bundle: Path) -> Json:
    """Return the in-toto statement that lists every file of the folder, sorted by name."""
    manifest = json.loads((bundle / verify.MANIFEST).read_bytes())
    names = sorted(name for name, _ in verify.list_entries(bundle))
    digests = {name: digest_file(bundle / name) for name in names}
    return compose_statement(f"{manifest['name']}-{manifest['version']}", digests)


def compose_statement(name: str, digests: Mapping[str, str]) -> Json:
    """Build the in-toto statement that lists a bundle's files by digest, to be signed. digests:
    {name of a file: sha256}, in order"""
    return {
        "_type": signature.STATEMENT_TYPE,
        "subject": [
            {"name": name, "digest": {"sha256": signature.digest_subject([*digests.values()])}}
        ],
        "predicateType": signature.PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [],
            },
            "resources": [
                {"name": file, "algorithm": "sha256", "digest": digest}
                for file, digest in digests.items()
            ],
        },
    }


def sign_statement(statement: Json, private_key: Any) -> bytes:
    """Sign the statement on a bundle's files; return its signature file (a sigstore bundle) as
    bytes."""
    payload = json.dumps(statement, indent=1, sort_keys=True).encode()
    public_key = private_key.public_key()
    sig = private_key.sign(signature.encode_payload(payload), signature.algorithm(public_key))
    document = {
        "mediaType": signature.MEDIA_TYPE,
        "verificationMaterial": {
            "publicKey": {"hint": signature.digest_key(public_key)},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": signature.PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(sig).decode(), "keyid": ""}],
        },
    }
    return json.dumps(document).encode()
