"""Read and change index.json of an OCI image layout: a descriptor per tag, in order of tagging.

https://github.com/opencontainers/image-spec/blob/main/image-layout.md
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from optimizer.harness.errors import BundleError
from optimizer.publish.registries.place import Json, describe, encode, parse_document

FILE = "index.json"
MARK = "oci-layout"
MARK_CONTENT = json.dumps({"imageLayoutVersion": "1.0.0"}).encode()
REF_NAME = "org.opencontainers.image.ref.name"
EMPTY: Json = {"schemaVersion": 2, "manifests": []}


def read(data: bytes | None, where: str) -> Json:
    """Parse an OCI registry's index.json; None gives an index without tags. Raises BundleError for
    other bytes."""
    if data is None:
        return EMPTY
    index = parse_document(data, where)
    listed = index.get("manifests")
    if not isinstance(listed, list) or not all(
        isinstance(e, dict) and isinstance(e.get("digest"), str) for e in listed
    ):
        raise BundleError('"manifests" is not a list of descriptors', where=where)
    if not isinstance(index.get("annotations", {}), dict):
        raise BundleError("its annotations are not an object", where=where)
    return index


def annotation(index: Json, name: str) -> str:
    """Return an annotation of the registry's index, "" if it is missing."""
    value = index.get("annotations", {}).get(name, "")
    return value if isinstance(value, str) else ""


def annotate(index: Json, name: str, value: str) -> Json:
    """Return the registry's index with this annotation, or without it if the value is empty."""
    others = {k: v for k, v in index.get("annotations", {}).items() if k != name}
    annotations = {**others, **({name: value} if value else {})}
    bare = {k: v for k, v in index.items() if k != "annotations"}
    return {**bare, **({"annotations": annotations} if annotations else {})}


def resolve_tags(index: Json) -> dict[str, str]:
    """Return {tag: digest of its manifest} of an OCI index, in order of tagging."""
    return {tag: e["digest"] for e in index["manifests"] if (tag := _tag(e))}


def add_tags(index: Json, tags: Mapping[str, bytes]) -> bytes:
    """Return the bytes of the index with {tag: manifest's bytes} added or moved to its end."""
    others = [e for e in index["manifests"] if _tag(e) not in tags]
    added = [{**describe(data), "annotations": {REF_NAME: tag}} for tag, data in tags.items()]
    return encode({**index, "manifests": [*others, *added]})


def remove_tags(index: Json, tags: Collection[str]) -> bytes:
    """Return the bytes of an OCI index without these tags."""
    others = [e for e in index["manifests"] if _tag(e) not in tags]
    return encode({**index, "manifests": others})


def list_referenced_digests(manifest: Json) -> list[str]:
    """Return the digests in a manifest (config, layers) or in an index (manifests)."""
    entries = [manifest.get("config")]
    for key in ("layers", "manifests"):
        listed = manifest.get(key)
        entries += listed if isinstance(listed, list) else []
    return [
        e["digest"] for e in entries if isinstance(e, dict) and isinstance(e.get("digest"), str)
    ]


def _tag(entry: Json) -> str:
    annotations = entry.get("annotations")
    tag = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    return tag if isinstance(tag, str) else ""
