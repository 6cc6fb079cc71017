"""Write the manifest.json of a bundle's folder (format: harness/bundle/manifest.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.manifest import (
    MANIFEST,
    MEASURED,
    VERSION,
    digest,
    digest_content,
    read_manifest,
)
from optimizer.store import digest_file


def digest_files(bundle: Path) -> dict[str, dict[str, Any]]:
    """Return {name: {sha256, size, measured}} of a bundle's files but manifest.json, sorted."""
    names = sorted(p.relative_to(bundle).as_posix() for p in bundle.rglob("*") if p.is_file())
    return {
        name: {
            "sha256": digest_file(bundle / name),
            "size": (bundle / name).stat().st_size,
            "measured": name.startswith(MEASURED),
        }
        for name in names
        if name != MANIFEST
    }


def write(bundle: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Write manifest.json for the files now in the folder `bundle`, and return its content.

    document: fields other than manifest_version, files and digests, which are computed here

    Raises BundleError for a manifest that the harness would refuse.
    """
    listed = digest_files(bundle)
    fields = {
        **document,
        "manifest_version": VERSION,
        "files": listed,
        "content_digest": digest_content(document["contract"], listed, document.get("texts")),
    }
    # through JSON first: the digest is of the document as read, with lists for tuples
    manifest: dict[str, Any] = json.loads(json.dumps(fields))
    manifest["digest"] = digest(manifest)
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    (bundle / MANIFEST).write_text(text, encoding="utf-8")
    return read_manifest(bundle)
