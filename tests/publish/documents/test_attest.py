"""Tests of `attest`: bill of materials and provenance of a bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.errors import BundleError
from optimizer.harness.trust import signature
from optimizer.publish.documents import attest
from optimizer.publish.documents.provenance import build_provenance
from optimizer.publish.documents.sbom import build_sbom
from optimizer.store import digest_file
from tests.publish.servers.keys import write_keys

REPORT: dict[str, Any] = {
    "target": "onnxruntime-cpu",
    "quality": {
        "metric": "accuracy",
        "baseline": {"value": 0.9, "interval": [0.88, 0.92]},
        "candidate": {"value": 0.89, "interval": [0.87, 0.91]},
    },
    "speed": {
        "machine": {"cpu": "some", "cores": 2},
        "cells": [
            {
                "batch": 1,
                "sequence": 16,
                "systems": {"candidate": {"end_to_end": {"p50": 1.5, "p99": 2.5}}},
            },
            {"batch": 1, "prompt": 16},
        ],
    },
}
SOURCE = {
    "source": "org/model",
    "revision": "abc",
    "licence": "apache-2.0",
    "files": {"model.safetensors": {"sha256": "ab" * 32, "size": 3}},
}


def validate(text: str) -> object:
    from cyclonedx.schema import SchemaVersion  # reads a grammar for seconds
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


def manifest_of(bundle: Path, **changes: Any) -> dict[str, Any]:
    return {**read_manifest(bundle), "source": SOURCE, **changes}


def test_the_bill_of_materials_is_strict_cyclonedx(bundle: Path) -> None:
    document = build_sbom(manifest_of(bundle), [REPORT])
    assert validate(json.dumps(document)) is None
    document["metadata"]["component"]["modelCard"]["parameters"] = {}
    assert validate(json.dumps(document)) is not None


@pytest.mark.parametrize("licence", ["apache-2.0", "MIT", "llama3.2", "", None])
def test_any_licence_can_be_written(bundle: Path, licence: str | None) -> None:
    document = build_sbom(manifest_of(bundle, licence=licence), [])
    assert validate(json.dumps(document)) is None
    licences = document["metadata"]["component"].get("licenses", [])
    by_id = {"apache-2.0": "Apache-2.0", "MIT": "MIT"}
    expected = {"id": by_id[licence]} if licence in by_id else {"name": licence}
    assert licences == ([{"license": expected}] if licence else [])


def test_the_bill_names_every_file_data_set_and_package_once(bundle: Path) -> None:
    manifest = manifest_of(bundle)
    document = build_sbom(manifest, [REPORT])
    references = [c["bom-ref"] for c in document["components"]]
    assert len(references) == len(set(references))
    names = {c["name"]: c for c in document["components"]}
    assert {*manifest["files"], *manifest["packages"], "org/model"} <= set(names)
    engine = names["model/onnxruntime-cpu/model.onnx"]
    entry = manifest["files"][engine["name"]]
    assert engine["hashes"] == [{"alg": "SHA-256", "content": entry["sha256"]}]
    assert names["calibrate.jsonl"]["hashes"][0]["content"] == manifest["calibration"]["calibrate"]


def test_the_model_card_has_the_figures_of_the_report_with_their_intervals(bundle: Path) -> None:
    card = build_sbom(manifest_of(bundle), [REPORT])["metadata"]["component"]["modelCard"]
    figures = {
        (m["type"], m["slice"]): m for m in card["quantitativeAnalysis"]["performanceMetrics"]
    }
    ours = figures["accuracy", "onnxruntime-cpu: this model"]
    assert (ours["value"], ours["confidenceInterval"]["lowerBound"]) == ("0.89", "0.87")
    assert figures["p99 ms", "onnxruntime-cpu: batch 1, sequence 16"]["value"] == "2.5"
    assert len(figures) == 4


def test_provenance_pins_the_manifest_the_checkpoint_the_data_and_the_recipe(bundle: Path) -> None:
    manifest = manifest_of(bundle)
    statement = build_provenance(manifest, digest_file(bundle / "manifest.json"), [REPORT])
    (subject,) = statement["subject"]
    assert subject["digest"]["sha256"] == digest_file(bundle / "manifest.json")
    build = statement["predicate"]["buildDefinition"]
    assert build["externalParameters"]["recipe"] == manifest["recipe"]
    inputs = {d["name"]: d.get("digest", {}).get("sha256") for d in build["resolvedDependencies"]}
    assert inputs["source/model.safetensors"] == "ab" * 32
    assert inputs["data/validate"] == manifest["calibration"]["validate"]
    assert build["internalParameters"]["machines"]["onnxruntime-cpu"]["cores"] == 2


def test_attesting_twice_gives_the_same_bytes_and_leaves_the_bundle_alone(
    bundle: Path, tmp_path: Path
) -> None:
    before = digest_file(bundle / "manifest.json")
    first = [p.read_bytes() for p in attest.attest(bundle)]
    moved = Path(shutil.move(bundle, tmp_path / "elsewhere"))
    assert [p.read_bytes() for p in attest.attest(moved)] == first
    assert digest_file(moved / "manifest.json") == before


def test_signed_provenance_is_verified_with_the_key(bundle: Path, tmp_path: Path) -> None:
    private, public = write_keys(tmp_path)
    result = CliRunner().invoke(
        main, ["--json", "attest", str(bundle), "--key", str(private)], catch_exceptions=False
    )
    file = Path(json.loads(result.stdout)["provenance"])
    key = signature.load_public(public)
    statement = signature.open_envelope(file.read_bytes(), key, str(file))
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    with pytest.raises(BundleError, match="not about a folder's files"):
        signature.verify_signed_files(file.read_bytes(), key, str(file))


def test_a_damaged_bundle_is_not_attested(bundle: Path) -> None:
    (bundle / "LICENSE").write_text("Changed.\n")
    with pytest.raises(BundleError):
        attest.attest(bundle)
