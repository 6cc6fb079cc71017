"""Fetch a file of a published bundle that fits in memory."""

from __future__ import annotations

from optimizer.foundation.buckets.blob import digest_of
from optimizer.harness.errors import BundleError
from optimizer.harness.process.temporary import make_temporary_folder
from optimizer.harness.trust import verify
from optimizer.publish.registries.place import Json, Releases

SWAPPED = "Do not use it: its bytes are not those of the manifest. Get it elsewhere."


def fetch_small(place: Releases, layer: Json, where: str) -> bytes:
    """Fetch a small file of a published bundle, a registry's blob; BundleError for a wrong digest
    or above verify.LARGEST bytes."""
    if layer["size"] > verify.LARGEST:
        raise BundleError(f"{layer['size']:,} bytes where a small file is expected", where=where)
    with make_temporary_folder("pull") as folder:
        file = folder / "blob"
        place.receive(layer["digest"], layer["size"], file)
        data = file.read_bytes()
    if digest_of(data) != layer["digest"]:
        raise BundleError(f"the blob {layer['digest']} has other bytes", where=where, fix=SWAPPED)
    return data
