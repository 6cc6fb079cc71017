"""Write manifest.json over a bundle's folder. What is in it: harness/bundle/manifest.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.bundle.manifest import (
    MANIFEST,
    MEASURED,
    VERSION,
    content_digest,
    digest,
    read_manifest,
)
from optimizer.store import digest_file


def files(bundle: Path) -> dict[str, dict[str, Any]]:
    """The `files` of every file below the folder but the manifest, sorted by name."""
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
    """Write manifest.json over what is in the folder now, and return it.

    document: everything but manifest_version, files and the digests, which are computed here.
    Raises BundleError for one that the harness would refuse to read.
    """
    listed = files(bundle)
    fields = {
        **document,
        "manifest_version": VERSION,
        "files": listed,
        "content_digest": content_digest(document["contract"], listed),
    }
    # through JSON first: the digest is of what a reader finds, lists for tuples
    manifest: dict[str, Any] = json.loads(json.dumps(fields))
    manifest["digest"] = digest(manifest)
    text = json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False)
    (bundle / MANIFEST).write_text(text, encoding="utf-8")
    return read_manifest(bundle)
