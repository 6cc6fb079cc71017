"""`optimize inspect` and `optimize compare`: what a bundle says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.harness.runtimes import table


def inspect(bundle: Path) -> dict[str, Any]:
    """The manifest, plus the names of files that have not their recorded digest.

    Raises BundleError when the folder is no bundle, or its manifest names files outside it.
    """
    from optimizer.harness.manifest import damaged_files, read_manifest

    manifest = read_manifest(bundle)
    return {**manifest, "damaged": sorted(damaged_files(bundle, manifest, measured=True))}


def inspect_text(document: dict[str, Any]) -> str:
    """The document as lines for a person."""
    source = document["source"]
    lines = [
        f"{document['name']} version {document['version']}  (digest {document['digest'][:16]}, "
        f"content {document['content_digest'][:16]})",
        f"source   {source['source']}  revision {source.get('revision') or '-'}  "
        f"licence {document.get('licence') or 'unknown'}",
        f"task     {document['contract']['task']}",
        f"verdict  {document['verdict']}",
    ]
    lines += [
        f"dropped  {d['target']}: {d['gate']}: {d['message']}" for d in document.get("dropped", [])
    ]
    lines += [f"engine   {e['runtime']:<20}{_state(e)}" for e in document["engines"]]
    if not runnable(document):
        lines.append("This version's harness runs none of these: predict and bench will refuse.")
    for name, f in document["files"].items():
        lines.append(f"  {f['size']:>12,}  {f['sha256'][:12]}  {name}")
    damaged = document["damaged"]
    lines.append(
        "every file has its recorded digest" if not damaged else f"DAMAGED: {', '.join(damaged)}"
    )
    return "\n".join(lines)


def runnable(manifest: Mapping[str, Any]) -> bool:
    """Whether the harness runs any engine of the bundle on a machine that has its runtime.

    Computed for a manifest written before it was recorded.
    """
    recorded = manifest.get("runnable")
    if recorded is not None:
        return bool(recorded)
    return any(table.of(e["runtime"]).runs for e in manifest["engines"])


def _state(engine: Mapping[str, Any]) -> str:
    """What was done with one engine where the bundle was made, and what can be done with it."""
    runtime = table.of(engine["runtime"])
    state = "not there yet" if engine["engine"] is None else "built and checked where it was made"
    if not runtime.engine_files:
        state = "portable ONNX, opened and checked where it was made"
    if runtime.served_by:
        return f"a folder for {runtime.served_by}, read and checked where it was made"
    if engine["deferred"]:
        what = "not built" if runtime.engine_files else "not opened"
        state = f"{what} where the bundle was made ({engine['why'].rstrip('.')})"
    yet = "" if runtime.runs else "; this version's harness does not run it yet"
    return state + yet


def compare(a: Path, b: Path) -> dict[str, Any]:
    """{"a","b": figures of each, "recipe": the values that differ}.

    Raises BundleError when a folder is no bundle, or its report is damaged.
    """
    from optimizer.harness.manifest import read_manifest

    manifests = [read_manifest(p) for p in (a, b)]
    figures = [_figures(p, m) for p, m in zip((a, b), manifests, strict=True)]
    flat = [_flat(m["recipe"]) for m in manifests]
    changed = {
        key: [f.get(key) for f in flat]
        for key in sorted({*flat[0], *flat[1]})
        if flat[0].get(key) != flat[1].get(key)
    }
    return {"a": figures[0], "b": figures[1], "recipe": changed}


def _figures(bundle: Path, manifest: dict[str, Any]) -> dict[str, Any]:
    from optimizer.harness.errors import BundleError
    from optimizer.harness.manifest import intact

    entry = manifest["files"].get("report.json")
    if entry is None or not intact(bundle, "report.json", entry):
        raise BundleError(
            "damaged or missing: report.json", where=str(bundle), fix="Get the bundle again."
        )
    reports = json.loads((bundle / "report.json").read_text(encoding="utf-8"))
    figures: dict[str, Any] = {"bundle": str(bundle), "digest": manifest["digest"]}
    for report in reports if isinstance(reports, list) else [reports]:
        at = report["target"]
        quality = report.get("quality") or {}
        if quality:
            figures[f"{at}: {quality['metric']}"] = quality["candidate"]["value"]
            figures[f"{at}: mean cosine to float"] = quality["cosine"]["mean"]
        speed = report.get("speed") or {}
        for cell in speed.get("cells", []):
            times = cell["systems"]["candidate"]["end_to_end"]
            name = f"{at}: batch {cell['batch']} x {cell['sequence']}"
            figures[f"{name} p50 ms"] = times["p50"]
            figures[f"{name} p99 ms"] = times["p99"]
        if speed:
            figures[f"{at}: size bytes"] = speed["size"]["candidate_bytes"]
    return figures


def _flat(value: Any, at: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(v, dict) for v in value):
        items = {str(i): v for i, v in enumerate(value)}.items()
    else:
        return {at: value}
    return {
        k: v for key, inner in items for k, v in _flat(inner, f"{at}.{key}".lstrip(".")).items()
    }


def compare_text(document: dict[str, Any]) -> str:
    """The document as a table."""
    a, b = document["a"], document["b"]
    names = [n for n in {**a, **b} if n not in ("bundle", "digest")]
    width = max([len(n) for n in (*names, *document["recipe"])], default=0) + 2
    lines = [f"{'':<{width}}{a['bundle']:>24}  {b['bundle']:>24}"]
    lines += [f"{n:<{width}}{_figure(a.get(n)):>24}  {_figure(b.get(n)):>24}" for n in names]
    lines += ["", "recipe values that differ:" if document["recipe"] else "same recipe"]
    for key, (x, y) in document["recipe"].items():
        lines.append(f"{key:<{width}}{x!s:>24}  {y!s:>24}")
    return "\n".join(lines)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
