"""A bundle as the CNCF ModelPack specification has it: one raw layer a file, and a manifest.

https://github.com/modelpack/model-spec (docs/spec.md, schema/config-schema.json). A file's name
is in two annotations: org.cncf.model.filepath, and org.opencontainers.image.title, by which `oras
pull` restores folders too. A file that two bundles share is one blob. Nothing in the
manifest depends on time, so that a bundle has one digest wherever it is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from optimizer.harness import tasks
from optimizer.harness.errors import BundleError
from optimizer.harness.trust.verify import MANIFEST, entries, name_problem, parse
from optimizer.publish.registries.place import (
    EMPTY,
    EMPTY_TYPE,
    LARGEST_MANIFEST,
    MANIFEST_TYPE,
    Blob,
    Json,
    canonical,
    digest_of,
    document,
)
from optimizer.store import digest_file

ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
LAYER_TYPE = "application/vnd.cncf.model.{}.v1.raw"
FILE_PATH = "org.cncf.model.filepath"
TITLE = "org.opencontainers.image.title"
BUNDLE_DIGEST = "io.optimize-toolchain.bundle.digest"
MOST_LAYERS = 20_000
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
"""Of a file, by the beginning of its name; a licence is a "doc"."""
SMALL = (".json", ".jinja", ".txt", ".model")
"""Ends of names of a model's files other than weights."""


@dataclass(frozen=True)
class Artifact:
    """manifest: its bytes. files: by name. config: what the manifest names besides them."""

    manifest: bytes
    files: Mapping[str, Blob]
    config: Blob

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return the blobs that the manifest names, each once, the config first."""
        blobs = {blob.digest: blob for blob in (self.config, *self.files.values())}
        return tuple(blobs.values())


def artifact(bundle: Path, manifest: Mapping[str, Any]) -> Artifact:
    """Everything to publish of a bundle's folder, whose manifest.json is `manifest`."""
    sha256 = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    sha256[MANIFEST] = digest_file(bundle / MANIFEST)
    files = {
        name: Blob(f"sha256:{sha256[name]}", status.st_size, bundle / name)
        for name, status in sorted(entries(bundle))
    }
    data, config = _described(manifest, {n: (b.digest, b.size) for n, b in files.items()})
    return Artifact(data, files, config)


def described(data: bytes, where: str) -> bytes:
    """The manifest that `artifact` gives a bundle, from the bytes of its manifest.json alone.

    Raises BundleError for bytes that are not a manifest.json.
    """
    try:
        manifest = parse(data)
        files = {
            str(name): (f"sha256:{entry['sha256']}", int(entry["size"]))
            for name, entry in manifest["files"].items()
        }
        files[MANIFEST] = (digest_of(data), len(data))
        return _described(manifest, dict(sorted(files.items())))[0]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BundleError(
            f"{MANIFEST} cannot be read ({type(e).__name__}: {e})", where=where
        ) from None


def _described(
    manifest: Mapping[str, Any], files: Mapping[str, tuple[str, int]]
) -> tuple[bytes, Blob]:
    """files: {name: (digest, size)}, sorted. The manifest's bytes and its config."""
    config = Blob.of(canonical(_config(manifest, [digest for digest, _ in files.values()])))
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
    described = _manifest(ARTIFACT_TYPE, (CONFIG_TYPE, config), layers, annotations)
    return canonical(described), config


def referrer(attached: Blob, media_type: str, name: str, subject: Json) -> bytes:
    """The manifest of one file that belongs to a published bundle, its subject."""
    layer = {
        "mediaType": media_type,
        "digest": attached.digest,
        "size": attached.size,
        "annotations": {TITLE: name},
    }
    described = _manifest(media_type, (EMPTY_TYPE, EMPTY), [layer], {})
    keys = ("mediaType", "digest", "size")
    return canonical({**described, "subject": {key: subject[key] for key in keys}})


def layers_of(data: bytes, where: str, kind: str = ARTIFACT_TYPE) -> dict[str, Json]:
    """Read {file name: descriptor of its layer} from a manifest's untrusted bytes.

    Raises BundleError for the manifest of something else, and for names outside the folder.
    """
    manifest = document(data, where)
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
    named: dict[str, Json] = {}
    for layer in layers:
        annotations = layer.get("annotations") if isinstance(layer, dict) else None
        name = annotations.get(TITLE) if isinstance(annotations, dict) else None
        why = name_problem(name)
        if why or name in named or not well_described(layer):
            reason = why or "comes twice, or has no digest and size that can be"
            raise BundleError(f"the layer of {name!r:.100} {reason}", where=where)
        named[str(name)] = layer
    folders = {str(parent) for name in named for parent in PurePosixPath(name).parents}
    if both := folders & set(named):
        raise BundleError(f"{min(both)!r:.100} is a file and a folder", where=where)
    return named


def well_described(entry: Any) -> bool:
    """Return True for a descriptor with a SHA-256 digest and a size."""
    if not isinstance(entry, dict):
        return False
    digest, size = entry.get("digest"), entry.get("size")
    if not isinstance(digest, str) or not isinstance(size, int) or isinstance(size, bool):
        return False
    hexadecimal = digest.removeprefix("sha256:")
    named = digest.startswith("sha256:") and len(hexadecimal) == 64
    return named and set(hexadecimal) <= set("0123456789abcdef") and 0 <= size < 1 << 50


def _manifest(kind: str, config: tuple[str, Blob], layers: list[Json], annotations: Json) -> Json:
    media_type, blob = config
    described: Json = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": kind,
        "config": {"mediaType": media_type, "digest": blob.digest, "size": blob.size},
        "layers": layers,
    }
    if annotations:
        described["annotations"] = annotations
    if len(canonical(described)) > LARGEST_MANIFEST:
        raise BundleError(
            f"a manifest of {len(layers)} layers is above {LARGEST_MANIFEST:,} bytes",
            where="publish",
            fix="Registries refuse it; publish a bundle of fewer files.",
        )
    return described


FORMATS = {"compressed-tensors": "safetensors", "gguf": "gguf"}
"""{runtime: the format of its model}; of the others, ONNX."""


def _config(manifest: Mapping[str, Any], digests: list[str]) -> Json:
    """The ModelPack config: the keys of its schema, and no others."""
    source, recipe = manifest["source"], manifest["recipe"]
    quantize = recipe.get("quantize") or {}
    weights = quantize.get("weights") or {}
    runtimes = {engine["runtime"] for engine in manifest["engines"]}
    described: Json = {
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
            "outputTypes": [_output_type(tasks.task(manifest["contract"]["task"]))],
        },
    }
    if weights.get("bits"):
        config["precision"] = f"int{weights['bits']}"
    if quantize.get("method"):
        config["quantization"] = quantize["method"]
    return {
        "descriptor": described,
        "config": config,
        "modelfs": {"type": "layers", "diffIds": digests},
    }


def _output_type(task: tasks.Task) -> str:
    """As the specification calls what a task answers with."""
    if task.generates:
        return "text"
    return "other" if task.classifies else "embedding"


def _kind(name: str) -> str:
    kind = next((k for at, k in KINDS if name.startswith(at)), "doc")
    return "weight.config" if kind == "weight" and name.endswith(SMALL) else kind
