"""Make signing keys for one run of the tests."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

CURVES = {"P-256": ec.SECP256R1(), "P-384": ec.SECP384R1(), "P-521": ec.SECP521R1()}


def write_keys(folder: Path, name: str = "own", curve: str = "P-256") -> tuple[Path, Path]:
    """Write NAME.pem and NAME.pub, the private and the public key, into the folder."""
    key = ec.generate_private_key(CURVES[curve])
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public
