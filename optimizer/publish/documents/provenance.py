"""Describe the origin of a bundle in an in-toto statement with SLSA's provenance predicate (v1).

https://slsa.dev/spec/v1.0/provenance. The subject is manifest.json, which holds the digest of every
other file. The statement holds neither time nor place: the same bundle gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.harness.trust.signature import STATEMENT_TYPE
from optimizer.harness.trust.verify import MANIFEST
from optimizer.publish.documents.sbom import data_spec

Json = dict[str, Any]
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:optimize-toolchain:recipe:2"
"""Build by the recipe in externalParameters; 2 is the version of the manifest's format."""
BUILDER = "optimize-toolchain"


def build_provenance(
    manifest: Mapping[str, Any], sha256: str, reports: Sequence[Mapping[str, Any]]
) -> Json:
    """Return the in-toto statement on the origin of a bundle.

    manifest: content of manifest.json
    sha256: digest of manifest.json
    reports: content of report.json, one report per target
    """
    packages = manifest["packages"]
    machines = {
        str(report["target"]): (report.get("speed") or {}).get("machine")
        for report in reports
        if (report.get("speed") or {}).get("machine")
    }
    version = packages.get(BUILDER, "0")
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": MANIFEST, "digest": {"sha256": sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"recipe": manifest["recipe"]},
                "internalParameters": {"machines": machines},
                "resolvedDependencies": [
                    *_source(manifest["source"]),
                    *_data(manifest),
                    *(
                        {"uri": f"pkg:pypi/{name}@{v.replace('+', '%2B')}", "name": name}
                        for name, v in sorted(packages.items())
                    ),
                ],
            },
            "runDetails": {
                "builder": {"id": f"pkg:pypi/{BUILDER}@{version}", "version": {BUILDER: version}},
                "metadata": {"invocationId": manifest["digest"]},
                "byproducts": [
                    {"name": "digest", "digest": {"sha256": manifest["digest"]}},
                    {"name": "content_digest", "digest": {"sha256": manifest["content_digest"]}},
                ],
            },
        },
    }


def _source(source: Mapping[str, Any]) -> list[Json]:
    """List for a bundle's provenance the checkpoint with its revision, and each of its files."""
    revision = source.get("revision")
    entry: Json = {"name": "source", "uri": f"urn:checkpoint:{source['source']}"}
    if revision:
        entry["annotations"] = {"revision": revision}
    files = sorted((source.get("files") or {}).items())
    return [
        entry,
        *({"name": f"source/{n}", "digest": {"sha256": f["sha256"]}} for n, f in files),
    ]


def _data(manifest: Mapping[str, Any]) -> list[Json]:
    """List for a bundle's provenance each data set, named by its use, with the digest of its
    rows."""
    return [
        {
            "name": f"data/{use}",
            "digest": {"sha256": digest},
            "annotations": {
                key: value
                for key in ("source", "name", "files", "revision")
                if (value := data_spec(manifest["recipe"], use).get(key))
            },
        }
        for use, digest in sorted((manifest.get("calibration") or {}).items())
    ]
