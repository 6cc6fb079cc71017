"""Write README.md of a bundle on a model hub: description, use, quality and speed.

https://huggingface.co/docs/hub/model-cards. The front matter serves the hub's search and tables;
the numbers are those of report.json, with intervals. The same bundle gives the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from optimizer.harness import tasks
from optimizer.package.report.comparison import TableEntry, name_candidate, paired_note
from optimizer.package.report.rows import build_rows
from optimizer.publish.documents.sbom import SPDX, data_spec

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
LIBRARIES = ("onnx", "openvino", "gguf", "tensorrt")
"""Tags of the hub's search, used for runtimes whose name contains one."""
MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~])")

Document = Mapping[str, Any]


def write_model_card(manifest: Document, reports: Sequence[Document], repository: str) -> str:
    """Write the model card, README.md on the hub; repository: OWNER/NAME on the hub, for commands
    in the text."""
    front = yaml.safe_dump(
        front_matter(manifest, reports), sort_keys=False, allow_unicode=True, width=10_000
    )
    name, version = manifest["name"], manifest["version"]
    parts = [
        f"---\n{front}---",
        f"# {_escape(name)} {_escape(version)}",
        _lead(manifest),
        f"## Use\n\n{_use(repository, version)}",
        *(_figures(report, manifest["recipe"]) for report in reports if not report.get("dropped")),
        f"## Data\n\n{_data(manifest)}",
        f"## Recipe\n\n{_fold(yaml.safe_dump(manifest['recipe'], sort_keys=False))}",
        f"Digest of the bundle: `{manifest['digest']}`",
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(manifest: Document, reports: Sequence[Document]) -> dict[str, Any]:
    """Build the front matter of the model card, {field: value}, which the hub reads."""
    task = tasks.find_task(manifest["contract"]["task"])
    pipeline = task.pipeline_tag or task.name
    source = manifest["source"]
    metadata: dict[str, Any] = {**_licence(manifest.get("licence") or "")}
    if HUB_ID.fullmatch(source["source"]):
        metadata["base_model"] = source["source"]
        metadata["base_model_relation"] = "quantized"
    metadata["pipeline_tag"] = pipeline
    runtimes = sorted({engine["runtime"] for engine in manifest["engines"]})
    words = {word for word in LIBRARIES if any(word in runtime for runtime in runtimes)}
    metadata["tags"] = sorted({"optimize-toolchain", *runtimes, *words})
    results = [result for report in reports for result in _results(report, manifest, pipeline)]
    if results:
        metadata["model-index"] = [{"name": manifest["name"], "results": results}]
    return metadata


def _licence(name: str) -> dict[str, str]:
    """Return the front matter's licence fields: the hub's identifier, or "other" and the name."""
    if not name:
        return {}
    if name.lower() in SPDX:
        return {"license": name.lower()}
    return {"license": "other", "license_name": name}


def _results(report: Document, manifest: Document, pipeline: str) -> list[dict[str, Any]]:
    """Return for the model card the quality of this model on each evaluation set, as the
    model-index lists it."""
    sections = {"validate": report.get("quality")}
    for prefix, sets in (("also.", "also"), ("adapter.", "adapters")):
        sections |= {f"{prefix}{name}": part for name, part in (report.get(sets) or {}).items()}
    results = []
    for use, quality in sections.items():
        value = ((quality or {}).get("candidate") or {}).get("value")
        if quality is None or report.get("dropped") or not _is_number(value):
            continue
        metric = str(quality["metric"])
        data = {"name": _data_name(manifest, use), "type": use}
        figure = {"type": metric, "value": value, "name": f"{metric} ({report['target']})"}
        results.append({"task": {"type": pipeline}, "dataset": data, "metrics": [figure]})
    return results


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _lead(manifest: Document) -> str:
    source, engines = manifest["source"], manifest["engines"]
    revision = f" at revision `{source['revision']}`" if source.get("revision") else ""
    runs = ", ".join(f"{e['runtime']} on {e['device']}" for e in engines)
    licence = manifest.get("licence")
    return (
        f"{_escape(source['source'])}{revision}, {name_candidate(manifest['recipe'])}, for {runs}. "
        f"Verdict of its gates: {manifest['verdict']}."
        + (f" Licence of the model: {_escape(licence)}." if licence else "")
    )


def _use(repository: str, version: str) -> str:
    plain = (
        f"hf download {repository} --revision {version} --local-dir bundle\n"
        "pip install -r bundle/requirements.txt\n"
        'cd bundle && python -m harness predict "some text"'
    )
    verified = f"optimize pull hf://{repository}:{version}    # every file compared with its digest"
    return f"{_fence(plain, 'sh')}\n\n{_fence(verified, 'sh')}"


def _figures(report: Document, recipe: Document) -> str:
    lines = [
        f"## {_escape(report['target'])}: {report['verdict']}",
        "",
        f"| | float | {name_candidate(recipe)} | change |",
        "|---|---|---|---|",
    ]
    for row in build_rows(report):
        entries = [_write(entry) for entry in (row.before, row.after, row.change)]
        lines.append(f"| {_escape(row.name)} | {' | '.join(entries)} |")
    notes = f"Intervals are in parentheses; report.html has the rest. {paired_note(report)}"
    return "\n".join([*lines, "", notes.rstrip()])


def _write(entry: TableEntry) -> str:
    note = f" ({_escape(entry.note)})" if entry.note else ""
    return f"{_escape(entry.text)}{note}"


def _data(manifest: Document) -> str:
    lines = ["| use | data | sha256 of the rows |", "|---|---|---|"]
    for use, digest in sorted((manifest.get("calibration") or {}).items()):
        lines.append(f"| {_escape(use)} | {_escape(_data_name(manifest, use))} | `{digest}` |")
    return "\n".join(lines)


def _data_name(manifest: Document, use: str) -> str:
    spec = data_spec(manifest["recipe"], use)
    return str(spec.get("name") or ", ".join(spec.get("files") or ()) or use)


def _escape(text: object) -> str:
    """Return a text of the model card on one line, its markdown escaped."""
    return MARKUP.sub(r"\\\1", " ".join(str(text).split()))


def _fold(text: str) -> str:
    """Wrap YAML of the model card in a section that is collapsed at first."""
    summary = "<details><summary>complete with every default</summary>"
    return f"{summary}\n\n{_fence(text, 'yaml')}\n\n</details>"


def _fence(text: str, language: str) -> str:
    """Wrap text of the model card in a code block, with a fence longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"
