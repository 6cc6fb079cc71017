"""Write the bill of materials of a bundle as a CycloneDX 1.6 document with a model card (ML-BOM).

https://cyclonedx.org/docs/1.6/json/. The components are the checkpoint with the digests of its
files, the calibration and evaluation sets, the packages of the build, and every file of the bundle.
The serial number follows from the bundle's digest, so that the same bundle gives the same bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer import __version__

Json = dict[str, Any]
SPDX = {
    name.lower(): name
    for name in (
        *("Apache-2.0", "MIT", "BSD-2-Clause", "BSD-3-Clause", "GPL-3.0", "LGPL-3.0", "AGPL-3.0"),
        *("CC0-1.0", "CC-BY-4.0", "CC-BY-SA-4.0", "CC-BY-NC-4.0", "ISC", "MPL-2.0"),
    )
}
"""{lower-case name: SPDX identifier}; a licence that is missing here is written by its name."""
KINDS = {"model/": "machine-learning-model", "engines/": "machine-learning-model"}
"""{first characters of a file's name: component type}; the type of other files is "file"."""


def build_sbom(manifest: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> Json:
    """Build a bundle's SBOM, a CycloneDX document.

    manifest: content of manifest.json
    reports: content of report.json, one report per target
    """
    reference = f"{manifest['name']}@{manifest['version']}"
    components = [
        _source(manifest),
        *(_data_set(use, digest, manifest) for use, digest in _data(manifest)),
        *(_package(name, version) for name, version in sorted(manifest["packages"].items())),
        *_files(manifest),
    ]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, manifest['digest'])}",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": "optimize-toolchain", "version": __version__}
                ]
            },
            "component": {
                "type": "machine-learning-model",
                "bom-ref": reference,
                "name": manifest["name"],
                "version": manifest["version"],
                **_licences(manifest.get("licence") or ""),
                "modelCard": _model_card(manifest, reports),
                "properties": [
                    {"name": f"optimize:{key}", "value": str(manifest[key])}
                    for key in ("digest", "content_digest", "verdict")
                ],
            },
        },
        "components": components,
        "dependencies": [
            {"ref": reference, "dependsOn": sorted({c["bom-ref"] for c in components})}
        ],
    }


def _model_card(manifest: Mapping[str, Any], reports: Sequence[Mapping[str, Any]]) -> Json:
    contract = manifest["contract"]
    metrics = [metric for report in reports for metric in _metrics(report)]
    card: Json = {
        "modelParameters": {
            "task": contract["task"],
            "datasets": [{"ref": f"data:{use}"} for use, _ in _data(manifest)],
            "inputs": [{"format": _tensor(t)} for t in contract["inputs"]],
            "outputs": [{"format": _tensor(t)} for t in contract["outputs"]],
        },
        "properties": [
            {"name": f"optimize:engine:{e['target']}", "value": f"{e['runtime']} on {e['device']}"}
            for e in manifest["engines"]
        ],
    }
    if metrics:
        card["quantitativeAnalysis"] = {"performanceMetrics": metrics}
    return card


def _tensor(tensor: Mapping[str, Any]) -> str:
    return f"{tensor['name']}: {tensor['dtype']} {tensor['axes']}"


def _metrics(report: Mapping[str, Any]) -> list[Json]:
    """Return for a bundle's SBOM the quality of both models with intervals, and p50 and p99 of each
    timing cell."""
    target, quality = report["target"], report.get("quality") or {}
    metrics = [
        {
            "type": quality["metric"],
            "value": str(figure["value"]),
            "slice": f"{target}: {whose}",
            **_interval(figure.get("interval")),
        }
        for system, whose in (("baseline", "float"), ("candidate", "this model"))
        if (figure := quality.get(system))
    ]
    for cell in (report.get("speed") or {}).get("cells", []):
        systems = cell.get("systems", {})
        times = (systems.get("candidate") or {}).get("end_to_end") or {}
        where = f"{target}: batch {cell['batch']}, sequence {cell.get('sequence')}"
        metrics += [
            {"type": f"{name} ms", "value": str(times[name]), "slice": where}
            for name in ("p50", "p99")
            if times.get(name) is not None
        ]
    return metrics


def _interval(bounds: Sequence[float] | None) -> Json:
    if not bounds:
        return {}
    low, high = bounds
    return {"confidenceInterval": {"lowerBound": str(low), "upperBound": str(high)}}


def _licences(name: str) -> Json:
    if not name:
        return {}
    identifier = SPDX.get(name.lower())
    return {"licenses": [{"license": {"id": identifier} if identifier else {"name": name}}]}


def _source(manifest: Mapping[str, Any]) -> Json:
    """Return the SBOM's component of the checkpoint, with its files as components inside it."""
    source = manifest["source"]
    files = source.get("files") or {}
    component: Json = {
        "type": "machine-learning-model",
        "bom-ref": "source",
        "name": source["source"],
        "version": source.get("revision") or "",
        **_licences(source.get("licence") or ""),
    }
    if files:
        component["components"] = [
            {
                "type": "file",
                "bom-ref": f"source:{name}",
                "name": name,
                "hashes": [_sha256(f["sha256"])],
            }
            for name, f in sorted(files.items())
        ]
    return component


def _data(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    return sorted((manifest.get("calibration") or {}).items())


def _data_set(use: str, digest: str, manifest: Mapping[str, Any]) -> Json:
    """Return the SBOM's component of a data set; its digest is that of its rows."""
    spec = data_spec(manifest["recipe"], use)
    return {
        "type": "data",
        "bom-ref": f"data:{use}",
        "name": spec.get("name") or ", ".join(spec.get("files") or ()) or use,
        "version": spec.get("revision") or "",
        "hashes": [_sha256(digest)],
        **_licences(spec.get("licence") or ""),
        "data": [{"type": "dataset", "name": use}],
        **({"copyright": spec["attribution"]} if spec.get("attribution") else {}),
    }


def data_spec(recipe: Mapping[str, Any], use: str) -> Mapping[str, Any]:
    """Return for a bundle's documents the recipe's data section of a use, a key of the manifest's
    calibration; or {}."""
    validate = recipe.get("validate") or {}
    sections: dict[str, Any] = {
        "calibrate": (recipe.get("calibrate") or {}).get("data"),
        "validate": validate.get("data"),
        "train": validate.get("train"),
        "latency": (validate.get("latency") or {}).get("data"),
        **{n: (recipe.get("embeddings") or {}).get(n) for n in ("queries", "documents")},
        **{f"also.{n}": part.get("data") for n, part in (validate.get("also") or {}).items()},
        **{f"adapter.{n}": spec or validate.get("data") for n, spec in _adapters(recipe)},
    }
    return sections.get(use) or {}


def _adapters(recipe: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List for a bundle's SBOM (name, its data section or None) per adapter that requests can
    choose."""
    adapters = (recipe.get("model") or {}).get("adapters")
    sources = adapters.get("sources") or {} if isinstance(adapters, Mapping) else {}
    return [
        (n, one.get("data") if isinstance(one, Mapping) else None) for n, one in sources.items()
    ]


def _package(name: str, version: str) -> Json:
    url = f"pkg:pypi/{name}@{version.replace('+', '%2B')}"
    return {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}


def _files(manifest: Mapping[str, Any]) -> list[Json]:
    return [
        {
            "type": next((k for at, k in KINDS.items() if name.startswith(at)), "file"),
            "bom-ref": f"file:{name}",
            "name": name,
            "hashes": [_sha256(entry["sha256"])],
        }
        for name, entry in sorted(manifest["files"].items())
    ]


def _sha256(digest: str) -> Json:
    return {"alg": "SHA-256", "content": digest}
