"""Store the digests that an environment has named, in a manifest under the tag NAME.history.

Its annotation HISTORY lists them, oldest first, separated by spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.publish.registries.place import (
    EMPTY,
    EMPTY_TYPE,
    MANIFEST_TYPE,
    encode,
    parse_document,
)

SUFFIX = ".history"
HISTORY_TYPE = "application/vnd.optimize-toolchain.history.v1+json"
HISTORY = "io.optimize-toolchain.history"


def history_manifest(digests: Sequence[str]) -> bytes:
    """Build the manifest that records an environment's history in a registry.

    digests: oldest first
    """
    entry: dict[str, Any] = {"mediaType": EMPTY_TYPE, "digest": EMPTY.digest, "size": EMPTY.size}
    return encode(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": HISTORY_TYPE,
            "config": entry,
            "layers": [entry],
            "annotations": {HISTORY: " ".join(digests)},
        }
    )


def parse_digests(data: bytes, where: str) -> list[str]:
    """Return the digests in a history's manifest. Raises BundleError if it is not a JSON object."""
    annotations = parse_document(data, where).get("annotations")
    listed = annotations.get(HISTORY, "") if isinstance(annotations, dict) else ""
    return listed.split() if isinstance(listed, str) else []
