"""Read a bundle's manifest and reports for `optimize inspect` and `optimize compare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.harness.runtimes import table


def inspect(bundle: Path) -> dict[str, Any]:
    """Return the manifest plus two lists of file names: "damaged", files without their recorded
    digest, and "unlisted", files that the manifest lacks.

    Raises BundleError where the folder is not a bundle, or its manifest is not valid.
    """
    from optimizer.harness.bundle.manifest import damaged_files, read_manifest, unlisted_files

    manifest = read_manifest(bundle)
    return {
        **manifest,
        "damaged": sorted(damaged_files(bundle, manifest, reports=True)),
        "unlisted": unlisted_files(bundle, manifest),
    }


def exit_code(document: dict[str, Any]) -> int:
    """Return the exit code of `inspect`: 2 for damaged or unlisted files, else 0."""
    return 2 if document["damaged"] or document["unlisted"] else 0


def inspect_text(document: dict[str, Any]) -> str:
    """Format the result of `inspect` for a terminal."""
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
        lines.append(
            "This version's harness runs none of these engines: predict and bench will refuse."
        )
    for name, f in document["files"].items():
        lines.append(f"  {f['size']:>12,}  {f['sha256'][:12]}  {name}")
    damaged, unlisted = document["damaged"], document["unlisted"]
    lines += [f"DAMAGED: {', '.join(damaged)}"] if damaged else []
    lines += [f"NOT IN THE MANIFEST: {', '.join(unlisted)}"] if unlisted else []
    if not damaged and not unlisted:
        lines.append("every file has its recorded digest, without further files")
    return "\n".join(lines)


def runnable(manifest: Mapping[str, Any]) -> bool:
    """Return True where the harness runs at least one engine of the bundle; computed for older
    manifests, without the field "runnable"."""
    recorded = manifest.get("runnable")
    if recorded is not None:
        return bool(recorded)
    return any(table.of(e["runtime"]).runs for e in manifest["engines"])


def _state(engine: Mapping[str, Any]) -> str:
    """Describe an engine: built or opened where the bundle was made, or not."""
    runtime = table.of(engine["runtime"])
    state = "not there yet" if engine["engine"] is None else "built and checked where it was made"
    if not runtime.engine_files:
        state = "portable ONNX, opened and checked where it was made"
    if runtime.served_by:
        return f"for {runtime.served_by}, read and checked where it was made"
    if engine["deferred"]:
        what = "not built" if runtime.engine_files else "not opened"
        state = f"{what} where the bundle was made ({engine['why'].rstrip('.')})"
    yet = "" if runtime.runs else "; this version's harness does not run it yet"
    return state + yet


@dataclass(frozen=True)
class Description:
    """A bundle's path or address, manifest and reports."""

    bundle: str
    manifest: dict[str, Any]
    reports: list[dict[str, Any]]


def describe(bundle: Path, name: str = "", *, whole: bool = True) -> Description:
    """Return the description of the bundle in a folder.

    name: name to show instead of the path
    whole: False where only the manifest and the report are in the folder

    Raises BundleError where it is not a bundle, or its report is damaged.
    """
    from optimizer.harness.bundle.manifest import read_manifest, read_reports, refuse_damage

    manifest = read_manifest(bundle)
    if whole:
        refuse_damage(bundle, manifest)
    return Description(name or str(bundle), manifest, read_reports(bundle, manifest))


def compare(a: Description, b: Description) -> dict[str, Any]:
    """Return {"a", "b": {name: number}, "recipe": {path: [value in a, value in b]} that differ,
    "quality": results of the paired test that `optimize promote` uses}."""
    from optimizer.publish.environments import comparison

    flat = [_flat(one.manifest["recipe"]) for one in (a, b)]
    changed = {
        key: [f.get(key) for f in flat]
        for key in sorted({*flat[0], *flat[1]})
        if flat[0].get(key) != flat[1].get(key)
    }
    tested = comparison.compare(a.manifest, a.reports, b.manifest, b.reports)
    return {
        "a": _figures(a),
        "b": _figures(b),
        "recipe": changed,
        "quality": [vars(one) for one in tested],
    }


def _figures(one: Description) -> dict[str, Any]:
    figures: dict[str, Any] = {"bundle": one.bundle, "digest": one.manifest["digest"]}
    for report in one.reports:
        at = report["target"]
        quality = report.get("quality") or {}
        if quality:
            figures[f"{at}: {quality['metric']}"] = quality["candidate"]["value"]
        if cosine := quality.get("cosine"):
            figures[f"{at}: mean cosine to float"] = cosine.get("mean")
        speed = report.get("speed") or {}
        for cell in speed.get("cells", []):
            if "prompt" in cell:
                continue
            times = cell["systems"]["candidate"]["end_to_end"]
            name = f"{at}: batch {cell['batch']} x {cell['sequence']}"
            figures[f"{name} p50 ms"] = times["p50"]
            figures[f"{name} p99 ms"] = times.get("p99")
        if size := speed.get("size"):
            figures[f"{at}: size bytes"] = size.get("candidate_bytes")
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
    """Format the result of `compare` as a table."""
    a, b = document["a"], document["b"]
    names = [n for n in {**a, **b} if n not in ("bundle", "digest")]
    width = max([len(n) for n in (*names, *document["recipe"])], default=0) + 2
    lines = [f"a: {a['bundle']}", f"b: {b['bundle']}", "", f"{'':<{width}}{'a':>24}  {'b':>24}"]
    lines += [f"{n:<{width}}{_figure(a.get(n)):>24}  {_figure(b.get(n)):>24}" for n in names]
    lines += ["", "b compared with a on the same examples:"] if document["quality"] else []
    lines += [f"{one['verdict']:<14}{one['message']}" for one in document["quality"]]
    lines += ["", "recipe values that differ:" if document["recipe"] else "same recipe"]
    for key, (x, y) in document["recipe"].items():
        lines.append(f"{key:<{width}}{x!s:>24}  {y!s:>24}")
    return "\n".join(lines)


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
