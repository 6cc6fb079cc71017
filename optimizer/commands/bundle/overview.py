"""Describe a bundle in six lines for `optimize inspect`: bundle, task, quality, latency, size, runs
here; a line on adapters where requests choose from some.

Figures are those of the target that runs on this machine, else of the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.tasks.embeddings import image_text_embedding
from optimizer.package.report.cards import generation
from optimizer.package.report.comparison import (
    SYSTEMS,
    TableRow,
    baseline,
    divide,
    get_part,
    get_parts,
    latency_rows,
    name_candidate,
    quality_rows,
)
from optimizer.package.report.figures import plain, size, times

Document = Mapping[str, Any]
LABELS = 3  # names of labels that are printed


def summarize(
    manifest: Document, reports: Sequence[Document], fits: Sequence[Document], unread: str = ""
) -> dict[str, str]:
    """Write the first lines of `optimize inspect`, {name of a line: text}.

    reports: report.json of each target; empty where it cannot be read
    fits: rows of examine.examine_engines
    unread: sentence in place of figures where report.json cannot be read
    """
    runs = [fit for fit in fits if fit["how"]]
    target = runs[0]["target"] if runs else manifest["engines"][0]["target"]
    report: Document = next((r for r in reports if r.get("target") == target), {})
    several = f"{target}: " if len(manifest["engines"]) > 1 else ""
    source, licence = manifest["source"]["source"], manifest.get("licence") or "unknown"
    adapters = _adapters(report)
    return {
        "bundle": f"{manifest['name']} version {manifest['version']}: "
        f"{name_candidate(manifest['recipe'])} of {source}, licence {licence}, "
        f"verdict {manifest['verdict']}",
        "task": _task(manifest["contract"]),
        "quality": several + (_quality(report) if report else unread),
        **({"adapters": several + adapters} if adapters else {}),
        "latency": several + (_latency(report) if report else unread),
        "size": several + _size(manifest, report),
        "runs here": _runs_here(runs, fits),
    }


def _task(document: Document) -> str:
    contract = Contract.from_json(document, "contract")
    adapters = f"; adapters to choose: {', '.join(contract.adapters)}" if contract.adapters else ""
    return f"{contract.task}: {_input(contract)} in, {_output(contract)} out{adapters}"


def _input(contract: Contract) -> str:
    if contract.task == image_text_embedding.TASK.name and contract.image is not None:
        size = f"{contract.image.height} × {contract.image.width}"
        return f"an image (resized to {size}) or a text (folder texts, a bundle of its own)"
    if contract.image is not None:
        return f"an image (resized to {contract.image.height} × {contract.image.width})"
    if contract.generation is not None:
        return f"a prompt (with its answer up to {plain(contract.generation.context)} tokens)"
    if contract.zero_shot is not None:
        return f"a text and labels (up to {plain(contract.text.max_length)} tokens)"
    if contract.answers is not None:
        return (
            f"a question and its context (in windows of {plain(contract.text.max_length)} tokens)"
        )
    if contract.tokenizer is not None:
        return f"a text (up to {plain(contract.tokenizer.max_length)} tokens)"
    return ", ".join(spec.name for spec in contract.inputs)


def _output(contract: Contract) -> str:
    try:
        task = tasks.find_task(contract.task)
    except KeyError:  # a task of another package, which is not installed
        return ", ".join(spec.name for spec in contract.outputs)
    if task.gives:
        return task.gives
    if task.generates:
        return "text"
    if task.fills:
        return "the likeliest tokens in place of each mask"
    if task.weighs:
        return "weights of entries of the vocabulary"
    if task.extracts:
        return "the words of the context that answer the question"
    if task.chooses:
        return "a score for each label"
    if contract.labels and len(contract.labels) == 1:
        return "a number"
    if contract.activation == "identity":
        return f"{len(contract.labels or ())} numbers ({', '.join(contract.labels or ())})"
    if contract.labels:
        names = ", ".join(contract.labels[:LABELS])
        more = ", ..." if len(contract.labels) > LABELS else ""
        kind = "a label per word" if task.per_position else "a label"
        kind = "any number of labels" if contract.multi_label else kind
        return f"{kind} (of {len(contract.labels)}: {names}{more})"
    arrays = task.tensors(contract).items()
    sizes = [f"{name} of {prod(shape)} numbers" for name, (_, shape) in arrays if shape]
    return " and ".join(sizes) or ", ".join(spec.name for spec in contract.outputs)


def _adapters(report: Document) -> str:
    """Return for `optimize inspect` the quality with each adapter that requests may choose; ""
    without adapters."""
    sections = get_part(report, "adapters")
    judged = {name: {**report, "quality": get_part(sections, name)} for name in sections}
    return "; ".join(f"{n}: {_quality(one, f'adapter.{n}.')}" for n, one in judged.items())


def _quality(report: Document, gates: str = "") -> str:
    """Write for `optimize inspect` the quality of a report in words: metric, change, margin and
    verdict.

    gates: prefix of the names of the report's gates; "": those of the model without adapters
    """
    generates = generation.is_generation(report)
    row = (generation.quality_rows if generates else quality_rows)(report)[0]
    if row.unmeasured:
        return _unmeasured(row)
    verdict = next(
        (
            g
            for g in get_parts(report, "gates")
            if str(g.get("name")).startswith(f"{gates}quality.")
        ),
        {},
    )
    margin = get_part(report, "quality").get("margin")
    text = f"{row.name.lower()} {_entry(row, 'after')}, float {row.before.text}, "
    text += f"change {_entry(row, 'change')}, margin {plain(margin)}"
    return f"{text}: {verdict['verdict']}" if verdict.get("verdict") else text


def _latency(report: Document) -> str:
    tokens = generation.latency_rows(report) if generation.is_generation(report) else []
    rows = tokens or latency_rows(report)
    row = next((r for r in rows if " p50" in r.name or r.name.startswith("p50")), rows[0])
    if row.unmeasured:
        return _unmeasured(row)
    speed = get_part(report, "speed")
    machine, cell = get_part(speed, "machine"), get_parts(speed, "cells")[0]
    other = baseline(cell, str(report.get("target"))) or "float"
    threads = plain(speed.get("threads"))
    where = f"{machine.get('cpu')}, {threads} thread{'' if threads == '1' else 's'}"
    return (
        f"{row.name}: {_entry(row, 'after')}, {_entry(row, 'change')} the time of "
        f"{SYSTEMS.get(other, other)}; on {where}"
    )


def _size(manifest: Document, report: Document) -> str:
    files = [file["size"] for file in manifest["files"].values()]
    folder = f"folder {size(sum(files))} in {len(files)} files"
    sizes = get_part(get_part(report, "speed"), "size") or get_part(report, "size")
    if not sizes:
        return folder
    before, after = sizes.get("float_bytes"), sizes.get("candidate_bytes")
    return f"model file {size(after)}, {times(divide(after, before))} of float; {folder}"


def _runs_here(runs: Sequence[Document], fits: Sequence[Document]) -> str:
    others = [
        f"{fit['target']} ({fit['why'].partition(': ')[2]})" for fit in fits if not fit["how"]
    ]
    if not runs:
        return f"no: not {', not '.join(others)}"
    how = {"load": "", "build": " (built at the first start)"}[runs[0]["how"]]
    also = f"; not {', not '.join(others)}" if others else ""
    return f"yes, by {runs[0]['target']}{how}{also}"


def _unmeasured(row: TableRow) -> str:
    return f"{row.before.text}: {row.before.note}"


def _entry(row: TableRow, name: str) -> str:
    entry = getattr(row, name)
    return f"{entry.text} ({entry.note})" if entry.note else str(entry.text)
