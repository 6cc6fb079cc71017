"""Convert a bundle to the CNCF ModelPack format: a manifest with one raw layer per file.

https://github.com/modelpack/model-spec (docs/spec.md, schema/config-schema.json). Two annotations
hold a file's name: org.cncf.model.filepath, and org.opencontainers.image.title, from which `oras
pull` restores folders. The manifest holds no time: a bundle has the same digest in every place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from optimizer.foundation.buckets.blob import Blob, digest_of
from optimizer.harness import tasks
from optimizer.harness.errors import BundleError
from optimizer.harness.trust.verify import MANIFEST, list_entries, name_problem, parse
from optimizer.publish.registries.place import (
    EMPTY,
    EMPTY_TYPE,
    LARGEST_MANIFEST,
    MANIFEST_TYPE,
    Json,
    encode,
    parse_document,
)
from optimizer.store import digest_file

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
LAYER_TYPE = "application/vnd.cncf.model.{}.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"
BUNDLE_DIGEST = "io.optimize-toolchain.bundle.digest"
MOST_LAYERS = 20_000  # of an artifact that is read
KINDS = (
    ("harness/", "code"),
    ("verify.py", "code"),
    ("requirements", "code"),
    ("tokenizer/", "weight.config"),
    (MANIFEST, "weight.config"),
    ("report.", "doc"),
    ("model/", "weight"),
    ("engines/", "weight"),
)
"""(first characters of a file's name, kind of its layer); the kind of other files is "doc"."""
SMALL = (".json", ".jinja", ".txt", ".model")
"""Suffixes of model files that hold no weights."""


@dataclass(frozen=True)
class Artifact:
    """Bundle in the ModelPack format: bytes of its manifest, {name: file}, and ModelPack config."""

    manifest: bytes
    files: Mapping[str, Blob]
    config: Blob

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Blobs that the bundle's manifest lists, each once, the config first."""
        blobs = {blob.digest: blob for blob in (self.config, *self.files.values())}
        return tuple(blobs.values())


def build_artifact(bundle: Path, manifest: Mapping[str, Any]) -> Artifact:
    """Return the artifact of the folder `bundle`; manifest: content of its manifest.json."""
    sha256 = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    sha256[MANIFEST] = digest_file(bundle / MANIFEST)
    files = {
        name: Blob(f"sha256:{sha256[name]}", status.st_size, bundle / name)
        for name, status in sorted(list_entries(bundle))
    }
    data, config = _assemble(manifest, {n: (b.digest, b.size) for n, b in files.items()})
    return Artifact(data, files, config)


def build_manifest(data: bytes, where: str) -> bytes:
    """Build the ModelPack manifest of `build_artifact` from `data`, the bytes of manifest.json.

    Raises BundleError for bytes that are not a manifest.json.
    """
    try:
        manifest = parse(data)
        files = {
            str(name): (f"sha256:{entry['sha256']}", int(entry["size"]))
            for name, entry in manifest["files"].items()
        }
        files[MANIFEST] = (digest_of(data), len(data))
        return _assemble(manifest, dict(sorted(files.items())))[0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BundleError(
            f"{MANIFEST} cannot be read ({type(e).__name__}: {e})", where=where
        ) from None


def _assemble(
    manifest: Mapping[str, Any], files: Mapping[str, tuple[str, int]]
) -> tuple[bytes, Blob]:
    """Return the ModelPack manifest's bytes and config; files: {name: (digest, bytes)}, sorted."""
    config = Blob.describe(encode(_config(manifest, [digest for digest, _ in files.values()])))
    layers = [
        {
            "mediaType": LAYER_TYPE.format(_kind(name)),
            "digest": digest,
            "size": size,
            "annotations": {FILE_PATH: name, TITLE: name},
        }
        for name, (digest, size) in files.items()
    ]
    annotations = {
        TITLE: manifest["name"],
        "org.opencontainers.image.version": manifest["version"],
        BUNDLE_DIGEST: manifest["digest"],
    }
    if licence := manifest.get("licence"):
        annotations["org.opencontainers.image.licenses"] = licence
    return encode(_manifest(ARTIFACT_TYPE, (CONFIG_TYPE, config), layers, annotations)), config


def build_referrer(attached: Blob, media_type: str, name: str, subject: Json) -> bytes:
    """Build the manifest of one attachment; subject: descriptor of the bundle's manifest."""
    layer = {
        "mediaType": media_type,
        "digest": attached.digest,
        "size": attached.size,
        "annotations": {TITLE: name},
    }
    manifest = _manifest(media_type, (EMPTY_TYPE, EMPTY), [layer], {})
    keys = ("mediaType", "digest", "size")
    return encode({**manifest, "subject": {key: subject[key] for key in keys}})


def read_layers(data: bytes, where: str, kind: str = ARTIFACT_TYPE) -> dict[str, Json]:
    """Read {file name: descriptor of its layer} from the untrusted bytes of a published bundle's
    manifest.

    Raises BundleError for another artifact type, and for invalid names, digests and sizes.
    """
    manifest = parse_document(data, where)
    found_kind = manifest.get("artifactType")
    if found_kind != kind or manifest.get("mediaType") != MANIFEST_TYPE:
        raise BundleError(
            f"the artifact has the type {found_kind!r:.100}", where=where, accepted=kind
        )
    layers = manifest.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MOST_LAYERS:
        raise BundleError(
            "its layers are not a list", where=where, accepted=f"1 to {MOST_LAYERS:,} layers"
        )
    by_name: dict[str, Json] = {}
    for layer in layers:
        annotations = layer.get("annotations") if isinstance(layer, dict) else None
        name = annotations.get(TITLE) if isinstance(annotations, dict) else None
        why = name_problem(name)
        if why or name in by_name or not is_descriptor(layer):
            reason = why or "comes twice, or has an invalid digest or size"
            raise BundleError(f"the layer of {name!r:.100} {reason}", where=where)
        by_name[str(name)] = layer
    folders = {str(parent) for name in by_name for parent in PurePosixPath(name).parents}
    if both := folders & set(by_name):
        raise BundleError(f"{min(both)!r:.100} is both a file and a folder", where=where)
    return by_name


def is_descriptor(entry: Any) -> bool:
    """Return True for a descriptor of the OCI format: an object with a SHA-256 digest and a size
    below 1 PiB."""
    if not isinstance(entry, dict):
        return False
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not isinstance(size, int) or isinstance(size, bool):
        return False
    hexadecimal = digest.removeprefix("sha256:")
    is_sha256 = digest.startswith("sha256:") and len(hexadecimal) == 64
    return is_sha256 and set(hexadecimal) <= set("0123456789abcdef") and 0 <= size < 1 << 50


def _manifest(kind: str, config: tuple[str, Blob], layers: list[Json], annotations: Json) -> Json:
    media_type, blob = config
    manifest: Json = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": {"mediaType": media_type, "digest": blob.digest, "size": blob.size},
        "layers": layers,
    }
    if annotations:
        manifest["annotations"] = annotations
    if len(encode(manifest)) > LARGEST_MANIFEST:
        raise BundleError(
            f"the manifest, of {len(layers)} layers, is above {LARGEST_MANIFEST:,} bytes",
            where="publish",
            fix="Registries refuse it; publish a bundle of fewer files.",
        )
    return manifest


FORMATS = {"compressed-tensors": "safetensors", "gguf": "gguf"}
"""{runtime: format of its model}; the format of the others is ONNX."""


def _config(manifest: Mapping[str, Any], digests: list[str]) -> Json:
    """Build the ModelPack config, with the keys of its schema only."""
    source, recipe = manifest["source"], manifest["recipe"]
    quantize = recipe.get("quantize") or {}
    weights = quantize.get("weights") or {}
    runtimes = {engine["runtime"] for engine in manifest["engines"]}
    model: Json = {
        "name": manifest["name"],
        "version": manifest["version"],
        "sourceURL": source["source"],
        **({"revision": source["revision"]} if source.get("revision") else {}),
        **({"licenses": [manifest["licence"]]} if manifest.get("licence") else {}),
    }
    config: Json = {
        "format": FORMATS.get(next(iter(runtimes)), "onnx") if len(runtimes) == 1 else "onnx",
        "capabilities": {
            "inputTypes": ["text"],
            "outputTypes": [_output_type(tasks.find_task(manifest["contract"]["task"]))],
        },
    }
    if weights.get("bits"):
        config["precision"] = f"int{weights['bits']}"
    if quantize.get("method"):
        config["quantization"] = quantize["method"]
    return {
        "descriptor": model,
        "config": config,
        "modelfs": {"type": "layers", "diffIds": digests},
    }


def _output_type(task: tasks.Task) -> str:
    """Return the specification's name of a task's output: "text", "embedding" or "other"."""
    if task.generates:
        return "text"
    return "other" if task.classifies else "embedding"


def _kind(name: str) -> str:
    kind = next((k for at, k in KINDS if name.startswith(at)), "doc")
    return "weight.config" if kind == "weight" and name.endswith(SMALL) else kind
