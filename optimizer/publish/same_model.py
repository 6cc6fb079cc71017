"""Compare the models of two bundles by their manifests: task, architecture, source, outputs and
tokenizer. Two versions of one model agree in all of them; a checkpoint in a local folder may have
been trained again and moved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.foundation.buckets.blob import digest_of
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import verify
from optimizer.publish.environments.history import SUFFIX
from optimizer.publish.model_pack import read_layers
from optimizer.publish.registries.place import Json, Releases, parse_document
from optimizer.publish.small_files import fetch_small

MOST = 20  # bundles that a new one is compared with
TOKENIZER = "tokenizer/tokenizer.json"
Manifest = Mapping[str, Any]


def list_differences(old: Manifest, new: Manifest) -> list[str]:
    """List the parts of the model in which two bundles' manifests differ, as "task A, and B
    there"."""
    parts = {
        "task": [m["contract"]["task"] for m in (new, old)],
        "architecture": [m["source"].get("architecture") for m in (new, old)],
        "source": [m["source"]["source"] for m in (new, old)],
        "outputs": [_outputs(m["contract"]) for m in (new, old)],
        "tokenizer": [m["files"].get(TOKENIZER, {}).get("sha256", "none")[:12] for m in (new, old)],
    }
    if any(str(source).startswith(("/", "file:")) for source in parts["source"]):
        del parts["source"]
    return [
        f"{name} {a}, and {b} there"
        for name, (a, b) in parts.items()
        if a is not None and b is not None and a != b
    ]


def _outputs(contract: Manifest) -> str:
    arrays = ", ".join(f"{o['name']} {o['axes']}" for o in contract["outputs"])
    labels = contract.get("labels")
    return f"{arrays} with the labels {', '.join(labels)}" if labels else arrays


def check_same_model(place: Releases, digest: str, manifest: Manifest) -> None:
    """Compare a bundle to publish with those that the place holds, up to MOST.

    digest: digest of its ModelPack manifest

    Raises RecipeError where none of them holds the same model.
    """
    try:
        tags = [tag for tag in place.tags() if not tag.endswith(SUFFIX)]
    except MachineError:  # a registry may let a writer write and not list
        return
    other: list[str] = []
    where = ""
    for tag in tags[-MOST:][::-1]:
        data = place.read_manifest(tag)
        if data is None or digest_of(data) == digest:
            return
        try:
            differ = list_differences(_read(place, data, tag), manifest)
        except (BundleError, KeyError, TypeError, AttributeError):  # not a bundle, or damaged
            continue
        if not differ:
            return
        if not other:
            other, where = differ, tag
    if other:
        raise RecipeError(
            f"another model is published here: {'; '.join(other)}",
            where=f"tag {where}",
            fix="Give the address of another repository, or, if that is meant: "
            "optimize publish BUNDLE ADDRESS --new-model.",
        )


def _read(place: Releases, data: bytes, where: str) -> Json:
    """Fetch the manifest.json of a bundle; data: bytes of its ModelPack manifest."""
    layer = read_layers(data, where)[verify.MANIFEST]
    return parse_document(fetch_small(place, layer, where), where)
