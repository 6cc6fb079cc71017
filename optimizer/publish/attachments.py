"""Files that belong to a bundle but lie beside its folder, so that its digest does not change.

FOLDER.sig                a signature: harness/trust/signature.py
FOLDER.sbom.json          bill of materials: documents/sbom.py
FOLDER.provenance.json    origin of the bundle: documents/provenance.py
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
    """A kind of file beside a bundle.

    suffix: end of the file's name, after the folder's name.
    media_type: media type under which a registry stores it.
    """

    suffix: str
    media_type: str


SIGNATURE = Attachment(".sig", "application/vnd.dev.sigstore.bundle.v0.3+json")
SBOM = Attachment(".sbom.json", "application/vnd.cyclonedx+json")
PROVENANCE = Attachment(".provenance.json", "application/vnd.in-toto+json")
REPORT = Attachment(".report.html", "text/html")
"""A file inside the bundle, attached so that a registry can show it alone."""
ATTACHMENTS = (SIGNATURE, SBOM, PROVENANCE)


def attachment_path(bundle: Path, attachment: Attachment) -> Path:
    """Return the path of one kind of attachment of the folder `bundle`, e.g. FOLDER.sig."""
    folder = bundle.resolve()
    return folder.with_name(f"{folder.name}{attachment.suffix}")


def names_bundle(attachment: Attachment, data: bytes, bundle: Path) -> bool:
    """Return True if the attachment's bytes `data` name this bundle; the author is not checked."""
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
