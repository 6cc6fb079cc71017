"""What belongs to a bundle and lies beside its folder, so that the bundle's digest stays as it is.

FOLDER.sig                a signature: harness/trust/signature.py
FOLDER.sbom.json          what it is made of: documents/sbom.py
FOLDER.provenance.json    how it was made: documents/provenance.py
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.manifest import MANIFEST, read_manifest
from optimizer.store import digest_file


@dataclass(frozen=True)
class Attachment:
    """suffix: of its file's name, after the folder's. media_type: of its bytes, by which a registry
    knows what it is."""

    suffix: str
    media_type: str


SIGNATURE = Attachment(".sig", "application/vnd.dev.sigstore.bundle.v0.3+json")
SBOM = Attachment(".sbom.json", "application/vnd.cyclonedx+json")
PROVENANCE = Attachment(".provenance.json", "application/vnd.in-toto+json")
REPORT = Attachment(".report.html", "text/html")
"""In the bundle; a registry shows it without the rest."""
ATTACHMENTS = (SIGNATURE, SBOM, PROVENANCE)


def beside(bundle: Path, attachment: Attachment) -> Path:
    """Where an attachment of the folder `bundle` lies."""
    folder = bundle.resolve()
    return folder.with_name(f"{folder.name}{attachment.suffix}")


def belongs(attachment: Attachment, data: bytes, bundle: Path) -> bool:
    """True for an attachment that names this folder. Its author is not verified here."""
    if attachment is REPORT:
        return True
    try:
        document: Any = json.loads(data)
        if attachment is SBOM:
            properties = document["metadata"]["component"]["properties"]
            values = {p["name"]: p["value"] for p in properties}
            return bool(values["optimize:digest"] == read_manifest(bundle)["digest"])
        if "dsseEnvelope" in document:
            document = json.loads(base64.b64decode(document["dsseEnvelope"]["payload"]))
        digests = {r["name"]: r["digest"] for r in document["predicate"].get("resources", ())}
        if attachment is PROVENANCE:
            digests = {s["name"]: s["digest"]["sha256"] for s in document["subject"]}
        return bool(digests.get(MANIFEST) == digest_file(bundle / MANIFEST))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
