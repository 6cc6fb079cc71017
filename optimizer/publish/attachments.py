"""What belongs to a bundle and lies beside its folder, so that the bundle's digest stays as it is.

FOLDER.sig                a signature: harness/signature.py
FOLDER.sbom.json          what it is made of: sbom.py
FOLDER.provenance.json    how it was made: provenance.py
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
