"""Read a bundle's manifest and reports for `optimize inspect` and `optimize compare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import wrap
from typing import Any

from optimizer.harness.errors import BundleError
from optimizer.harness.runtimes import table
from optimizer.package.report.comparison import get_part
from optimizer.package.report.figures import finite

NAMES = 11  # width of the names of lines
Document = Mapping[str, Any]


def inspect(bundle: Path) -> dict[str, Any]:
    """Collect for `optimize inspect` a bundle's manifest, plus "overview" (overview.py),
    "runs_here" (rows of examine.examine_engines), and two lists of file names: "damaged", files
    without their recorded digest, and "unlisted", files that the manifest lacks.

    Raises BundleError where the folder is not a bundle, or its manifest is not valid.
    """
    from optimizer.commands.bundle.examine import list_engines
    from optimizer.commands.bundle.overview import summarize
    from optimizer.harness.bundle.manifest import (
        list_damaged_files,
        list_unlisted_files,
        read_manifest,
        read_reports,
    )

    manifest = read_manifest(bundle)
    damaged = list_damaged_files(bundle, manifest, reports=True)
    reports, unread = [], ""
    try:
        reports = read_reports(bundle, manifest)
    except BundleError as e:
        unread = f"not shown: {e.problem}"
    fits = list_engines(manifest, damaged)
    return {
        **manifest,
        "overview": summarize(manifest, reports, fits, unread),
        "runs_here": fits,
        "damaged": sorted(damaged),
        "unlisted": list_unlisted_files(bundle, manifest),
    }


def exit_code(document: dict[str, Any]) -> int:
    """Return the exit code of `inspect`: 2 for damaged or unlisted files, else 0."""
    return 2 if document["damaged"] or document["unlisted"] else 0


def inspect_text(document: dict[str, Any], *, files: bool = False) -> str:
    """Format the result of `inspect` for a terminal. files: list every file."""
    lines = [f"{name:<{NAMES}}{text}" for name, text in document["overview"].items()]
    revision = document["source"].get("revision") or "-"
    lines += [
        "",
        f"{'digest':<{NAMES}}{document['digest'][:16]}, of what determines answers "
        f"{document['content_digest'][:16]}; revision of the source {revision}",
    ]
    lines += [
        f"{'dropped':<{NAMES}}{d['target']}: {d['gate']}: {d['message']}"
        for d in document.get("dropped", [])
    ]
    lines += [f"{'engine':<{NAMES}}{e['target']}: {_state(e)}" for e in document["engines"]]
    if not is_runnable(document):
        started = any(e["runtime"] == table.VLLM for e in document["engines"])
        lines.append(
            "The harness runs none of these engines: serve and bench start vLLM, predict refuses."
            if started
            else "This version's harness runs none of these engines: predict and bench will refuse."
        )
    if files:
        lines += [
            f"  {f['size']:>12,}  {f['sha256'][:12]}  {name}"
            for name, f in document["files"].items()
        ]
    damaged, unlisted = document["damaged"], document["unlisted"]
    lines += [f"DAMAGED: {', '.join(damaged)}"] if damaged else []
    lines += [f"NOT IN THE MANIFEST: {', '.join(unlisted)}"] if unlisted else []
    if not damaged and not unlisted:
        hidden = "" if files else " (--files lists them)"
        count = len(document["files"])
        lines.append(
            f"{'files':<{NAMES}}each of {count} has its recorded digest, no other is there{hidden}"
        )
    return "\n".join(lines)


def is_runnable(manifest: Mapping[str, Any]) -> bool:
    """Return True, for `optimize inspect`, where the harness runs at least one engine of the
    bundle; computed for older manifests, without the field "runnable"."""
    recorded = manifest.get("runnable")
    if recorded is not None:
        return bool(recorded)
    return any(table.look_up(e["runtime"]).runs for e in manifest["engines"])


def _state(engine: Mapping[str, Any]) -> str:
    """Describe for `optimize inspect` the state of an engine in a bundle: built or opened where the
    bundle was made, or not."""
    runtime = table.look_up(engine["runtime"])
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
    """A bundle as `optimize inspect` and `compare` read it: path or address, manifest, reports."""

    bundle: str
    manifest: dict[str, Any]
    reports: list[dict[str, Any]]


def describe(bundle: Path, name: str = "", *, whole: bool = True) -> Description:
    """Read the bundle in a folder for `optimize inspect` and `compare`.

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
    """Compare two bundles for `optimize compare`.

    Returns {"a", "b": {name: number}, "recipe": {path: [value in a, value in b]} of differing
    settings, "quality": results of the paired test that `optimize promote` uses, "speed", "size":
    sentences}.
    """
    from optimizer.publish import same_model
    from optimizer.publish.environments import comparison

    other = same_model.list_differences(a.manifest, b.manifest)
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
        "speed": _sentences(a, b, partial(_speed, apart="; ".join(other))),
        "size": _sentences(a, b, _size),
    }


def _sentences(
    a: Description, b: Description, write: Callable[[Document, Document], list[str]]
) -> list[str]:
    """Write for `optimize compare` a sentence per target and timing that both bundles have.

    write: function from the two reports' sections `speed` to sentences
    """
    old = {r["target"]: r.get("speed") or {} for r in a.reports}
    both = [(r["target"], r.get("speed") or {}) for r in b.reports if r["target"] in old]
    return [f"{at}, {text}" for at, speed in both for text in write(old[at], speed)]


def _speed(old: Document, new: Document, apart: str = "") -> list[str]:
    """Write for `optimize compare` a sentence for each timed size that both bundles have.

    apart: reason why times cannot be compared, or ""
    """
    before = {_place(c): c for c in old.get("cells", [])}
    machines = [(s.get("machine") or {}).get("cpu") for s in (old, new)]
    if machines[0] != machines[1]:
        apart = apart or f"timed on {machines[0]} and on {machines[1]}"
    cells = [c for c in new.get("cells", []) if _place(c) in before]
    return [f"time at {_place(c)}: {judge_speed(before[_place(c)], c, apart)}" for c in cells]


def judge_speed(old: Document, new: Document, apart: str = "") -> str:
    """Judge for `optimize compare` a timed size of two bundles: "faster", "slower" or "cannot be
    told", with the numbers, for one timed size.

    The word follows from the two ratios to the float baseline, each measured in turns within one
    run. The times themselves come from two runs, between which the load of the machine may have
    changed, so they are shown and not compared.

    old, new: cells of the two reports
    apart: reason why the two cells cannot be compared; "" if they can
    """
    times = [finite(_candidate(cell).get("p50")) for cell in (new, old)]
    p50 = " against ".join("?" if t is None else f"{t:.4g} ms" for t in times)
    seen = f"p50 {p50}, of two runs"
    floats = [get_part(cell, "ratio").get("to") for cell in (new, old)]
    if not apart and None in floats:
        apart = "without a float baseline timed in the same run"
    if not apart and floats[0] != floats[1]:
        apart = f"compared with {floats[0]} and with {floats[1]}"
    after, before = _ratio(new), _ratio(old)
    if apart or after is None or before is None:
        return f"cannot be told: {apart or 'too few runs for an interval'} ({seen})"
    (value, low, high), (other, other_low, other_high) = after, before
    figures = (
        f"{value:.3g} ({low:.3g} to {high:.3g}) of the time of {floats[0]} against "
        f"{other:.3g} ({other_low:.3g} to {other_high:.3g})"
    )
    word = "faster" if high < other_low else "slower" if low > other_high else "cannot be told"
    return f"{word}: {figures}; {seen}"


def _ratio(cell: Document) -> tuple[float, float, float] | None:
    """Return (median, lower end, upper end) of a timing cell's ratio to float, for `optimize
    compare`; None where one is unknown. Of generated text the ratio of the time between tokens."""
    ratio = get_part(cell, "ratio")
    ratio = get_part(ratio, "inter_token") if "prompt" in cell else ratio
    bounds = ratio.get("interval")
    if not isinstance(bounds, list) or len(bounds) != 2:
        return None
    median, low, high = map(finite, (ratio.get("median"), *bounds))
    return None if median is None or low is None or high is None else (median, low, high)


def _size(old: Document, new: Document) -> list[str]:
    before, after = ((s.get("size") or {}).get("candidate_bytes") for s in (old, new))
    if not before or after is None:
        return []
    if before == after:
        return [f"size: equal, {after:,} bytes"]
    word = "smaller" if after < before else "larger"
    return [f"size: {word}, {after:,} bytes against {before:,}, {after / before:.2f} times"]


def _figures(one: Description) -> dict[str, Any]:
    """Return {name: number} of all targets of a bundle, with its name and digest, for `compare`."""
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
            times, name = _candidate(cell), f"{at}: {_place(cell)}"
            figures[f"{name} p50 ms"] = times.get("p50")
            figures[f"{name} p99 ms"] = times.get("p99")
        if size := speed.get("size"):
            figures[f"{at}: size bytes"] = size.get("candidate_bytes")
    return figures


def _candidate(cell: Document) -> Document:
    """Return the candidate's times that `inspect` and `compare` show of a cell: end to end, or of
    one generated token."""
    system = get_part(get_part(cell, "systems"), "candidate")
    return get_part(system, "inter_token" if "prompt" in cell else "end_to_end")


def _place(cell: Document) -> str:
    if "prompt" in cell:
        return f"batch {cell['batch']} x {cell['prompt']} tokens of prompt, next token"
    return f"batch {cell['batch']} x {cell['sequence']}"


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


def compare_text(document: dict[str, Any], width: int = 100) -> str:
    """Format the result of `compare`: a table, then a sentence per gate. width: columns."""
    a, b = document["a"], document["b"]
    lines = _row("", "a", "b", width)
    lines += _row("bundle", a["bundle"], b["bundle"], width)
    for name in {**a, **b}:
        if name not in ("bundle", "digest"):
            lines += _row(name, _figure(a.get(name)), _figure(b.get(name)), width)
    lines += ["", "recipe values that differ:" if document["recipe"] else "same recipe"]
    for key, (x, y) in document["recipe"].items():
        lines += _row(key, str(x), str(y), width)
    sentences = [one["message"] for one in document["quality"]]
    sentences += [*document["speed"], *document["size"]]
    if document["speed"]:
        sentences.append(
            "a share of the time is the mean of the ratios in several openings of both systems, "
            "not the ratio of two p50s"
        )
    lines += ["", "b compared with a:" if sentences else "b and a have no target in common"]
    for text in sentences:
        lines += wrap(f"- {text}", width, subsequent_indent="  ")
    return "\n".join(lines)


def _row(name: str, x: str, y: str, width: int) -> list[str]:
    """Format for `optimize compare` a row of three columns, each wrapped in its column."""
    narrow = max((width - 4) * 3 // 10, 8)
    widths = (max(width - 4 - 2 * narrow, 8), narrow, narrow)
    columns = [wrap(text, w) for text, w in zip((name, x, y), widths, strict=True)]
    return [
        "  ".join(f"{text:<{w}}" for text, w in zip(parts, widths, strict=True)).rstrip()
        for parts in zip_longest(*columns, fillvalue="")
    ]


def _figure(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"
