"""Write the bill of materials and the provenance of a bundle beside its folder."""

from __future__ import annotations

import json
from pathlib import Path

from optimizer.foundation import atomic
from optimizer.harness.bundle.manifest import MANIFEST, read_manifest, read_reports, refuse_damage
from optimizer.publish.attachments import PROVENANCE, SBOM, attachment_path
from optimizer.publish.documents.provenance import build_provenance
from optimizer.publish.documents.sbom import build_sbom
from optimizer.publish.documents.sign import load_private, sign_statement
from optimizer.store import digest_file


def attest(bundle: Path, key: Path | None = None) -> tuple[Path, Path]:
    """Write FOLDER.sbom.json and FOLDER.provenance.json, and return their paths.

    key: private key that signs the provenance (a sigstore bundle); None for the plain statement.
    Raises BundleError for a folder that differs from its manifest.
    """
    manifest = read_manifest(bundle)
    refuse_damage(bundle, manifest)
    reports = read_reports(bundle, manifest)
    statement = build_provenance(manifest, digest_file(bundle / MANIFEST), reports)
    document = json.dumps(statement, indent=1, sort_keys=True).encode()
    signed = document if key is None else sign_statement(statement, load_private(key))
    paths = attachment_path(bundle, SBOM), attachment_path(bundle, PROVENANCE)
    atomic.write(
        paths[0], json.dumps(build_sbom(manifest, reports), indent=1, sort_keys=True).encode()
    )
    atomic.write(paths[1], signed)
    return paths
