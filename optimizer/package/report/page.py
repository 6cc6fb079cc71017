"""Render report.html: one self-contained file with the results of a run and their proof.

    document = {"name": str,
                "recipe":  the recipe as resolved,
                "source":  the load stage's source.json,
                "reports": [report.json of each target, in the recipe's order; "dropped": true for
                            targets that are not in the bundle],
                "manifest": manifest of the bundle, where there is one}

The page makes no network requests and runs no script. The same document gives the same bytes. A
section that was not measured is shown with the reason, from `"not_measured": {section: reason}` of
the report. Content is made here, markup in templates/page.html; summary.py is for a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optimizer.foundation.verdicts import worst
from optimizer.harness.shown import scrub_document
from optimizer.package.report.cards import hops, learning, sections, timed_sizes, vectors
from optimizer.package.report.comparison import (
    Document,
    get_part,
    get_parts,
    list_warnings,
    name_candidate,
    sort_gates,
)
from optimizer.package.report.figures import finite, size, whole
from optimizer.package.report.rows import list_further_reports
from optimizer.package.report.templating import environment
from optimizer.package.report.verdict import write_verdict
from optimizer.package.report.view import (
    Card,
    Page,
    Paragraph,
    ReportTable,
    Span,
    TargetPart,
    TargetVerdict,
    badge,
    line,
)


def render(document: Mapping[str, Any]) -> str:
    """Render the report of a run (report.html) as text, to be written as UTF-8; passwords in
    addresses are removed."""
    return environment().get_template("page.html").render(page=_page(scrub_document(document)))


def _page(document: Document) -> Page:
    source, manifest = get_part(document, "source"), get_part(document, "manifest")
    reports, recipe = get_parts(document, "reports"), document.get("recipe")
    files = {"Source files": get_part(source, "files"), "Bundle files": get_part(manifest, "files")}
    return Page(
        name=str(document.get("name", "unnamed")),
        verdict=_together(reports),
        lead=_lead(document),
        verdicts=tuple(_verdict(r, recipe, i) for i, r in enumerate(reports)),
        targets=tuple(_target(reports, recipe, i) for i in range(len(reports))),
        provenance=_provenance(document, reports),
        bundled=bool(manifest),
        files=tuple(_files(title, listed) for title, listed in files.items() if listed),
        recipe=json.dumps(recipe, indent=1, ensure_ascii=False, sort_keys=False, default=str),
    )


def _together(reports: list[Document]) -> str:
    kept = [r for r in reports if not r.get("dropped")]
    return worst(r.get("verdict") for r in kept) if kept else "no verdict"


def _lead(document: Document) -> str:
    source = get_part(document, "source")
    model = str(
        source.get("source") or get_part(get_part(document, "recipe"), "model").get("source")
    )
    pieces = [f"{name_candidate(document.get('recipe'))} of {model}"]
    if source.get("parameters") is not None:
        pieces.append(f"{_millions(source['parameters'])} parameters")
    if source.get("task"):
        pieces.append(str(source["task"]))
    return " · ".join(pieces)


def _millions(count: Any) -> str:
    number = finite(count)
    return whole(count) if number is None or number < 1e6 else f"{number / 1e6:.1f} million"


def _verdict(report: Document, recipe: Any, number: int) -> TargetVerdict:
    """Return the verdict of target `number`, with the gates that did not pass, and warnings."""
    verdict = str(report.get("verdict"))
    failing = [g for g in sort_gates(report) if g.get("verdict") != "pass"]
    return TargetVerdict(
        target=str(report.get("target")),
        href=f"#{_anchor(number)}",
        badge=badge(verdict),
        style=verdict if verdict in ("pass", "fail") else "inconclusive",
        gates=tuple(
            Paragraph(
                line(
                    badge(g.get("verdict")),
                    " ",
                    Span(str(g.get("name")), "strong"),
                    f": {g.get('message', '')}",
                )
            )
            for g in failing
        )
        + tuple(
            Paragraph(line(Span("warning", "strong"), f": {sentence}"))
            for sentence in list_warnings(report)
        ),
        sentence=write_verdict(report, recipe),
    )


def _anchor(number: int) -> str:
    return f"target-{number + 1}"


def _target(reports: list[Document], recipe: Any, number: int) -> TargetPart:
    """Return the cards of the report page on target `number`."""
    report = reports[number]
    groups = (
        (sections.comparison(report, recipe),),
        (sections.quality(report, recipe),),
        *((sections.quality(r, recipe, name),) for name, r in list_further_reports(report).items()),
        vectors.build_cards(report),
        sections.latency(report, recipe),
        sections.stages(report, recipe),
        (sections.gates(report),),
        timed_sizes.sizes(report),
        learning.build_cards(report),
        (hops.ledger(report),),
        (_modules(reports, number),),
        (sections.fallbacks(report),),
    )
    return TargetPart(str(report.get("target")), _anchor(number), groups)


def _modules(reports: list[Document], number: int) -> Card:
    """Return the card of a target's modules; a link to an earlier target with equal modules."""
    modules = reports[number].get("modules")
    same = next((i for i in range(number) if reports[i].get("modules") == modules), None)
    card = sections.modules(reports[number])
    if same is None or not modules:
        return card
    link = Span(str(reports[same].get("target")), href=f"#{_anchor(same)}")
    return Card(card.title, paragraphs=(Paragraph(line("The same weights as for ", link)),))


def _provenance(document: Document, reports: list[Document]) -> tuple[tuple[str, str], ...]:
    """Return (name, value) rows on the source, the bundle and the machines of the measurements."""
    source, manifest = get_part(document, "source"), get_part(document, "manifest")
    rows: list[tuple[str, Any]] = [
        (key.replace("_", " "), source.get(key))
        for key in ("source", "revision", "licence", "model_type", "architecture", "task")
    ]
    rows += [("parameters", whole(source.get("parameters")))]
    if manifest:
        rows += [
            ("bundle version", manifest.get("version")),
            ("bundle digest", manifest.get("digest")),
        ]
    packages = get_part(manifest, "packages") or get_part(manifest, "versions")
    if packages:
        rows.append(("packages", ", ".join(f"{k} {v}" for k, v in packages.items())))
    known = [(k, v) for k, v in rows if v not in (None, "")]
    return tuple((k, sections.format_value(v)) for k, v in (*known, *_machines(reports)))


def _machines(reports: list[Document]) -> list[tuple[str, Any]]:
    """Return the report's rows on the machine and packages with which each target was timed."""
    rows: list[tuple[str, Any]] = []
    for r in reports:
        speed = get_part(r, "speed")
        machine = get_part(speed, "machine")
        if machine:
            known = {k: v for k, v in machine.items() if k not in ("packages", "runners") and v}
            known |= {} if speed.get("threads") is None else {"threads": speed["threads"]}
            rows.append((f"measured on, {r.get('target')}", known))
            if machine.get("packages"):
                rows.append((f"measured with, {r.get('target')}", machine["packages"]))
    return rows


def _files(title: str, listed: Document) -> ReportTable:
    body = tuple(
        (
            line(Span(name, "code")),
            line(size(file.get("size"))),
            line(Span(str(file.get("sha256")), "code")),
        )
        for name, file in listed.items()
        if isinstance(file, Mapping)
    )
    return ReportTable(
        title, ("File", "Size", "SHA-256"), body, (1,), fold=f"{title} ({len(body)})"
    )
