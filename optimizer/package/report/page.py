"""report.html: one self-contained file that says what a run made and how that was proven.

    document = {"name": str,
                "recipe":  the recipe as resolved,
                "source":  the load stage's source.json,
                "reports": [report.json of each target, in the recipe's order; "dropped": true in
                            those of which nothing else is in the bundle],
                "manifest": the bundle's, when there is one}

The page asks nothing of the network and runs no script. The same document gives the same bytes.
A part that was not measured is shown as such with the reason, which a report gives as
`"not_measured": {section: reason}`; nothing is left out silently. `summary` says the gist in a
terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from optimizer.package.report import hops, sections
from optimizer.package.report.comparison import Document, gates_in_order, part, parts, quantized
from optimizer.package.report.figures import finite, size, whole
from optimizer.package.report.markup import Child, Html, details, table, tag
from optimizer.package.report.rows import further
from optimizer.package.report.style import CSS
from optimizer.package.report.summary import summary
from optimizer.package.report.verdict import sentence
from optimizer.verdicts import worst

__all__ = ["render", "summary"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(document: Mapping[str, Any]) -> str:
    """The page as text, to be written as UTF-8."""
    name = str(document.get("name", "unnamed"))
    reports = parts(document, "reports")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("title", f"{name}: {_together(reports)}"),
        tag("style", Html(CSS)),
    )
    main = tag(
        "main",
        _header(document, name),
        *(_verdict(r, document, i) for i, r in enumerate(reports)),
        None if reports else tag("p", "No target was judged: the run has no reports.", cls="bad"),
        *(_target(r, document, i) for i, r in enumerate(reports)),
        _provenance(document, reports),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', main), lang='en')}\n"


def _together(reports: list[Document]) -> str:
    kept = [r for r in reports if not r.get("dropped")]
    return worst(r.get("verdict") for r in kept) if kept else "no verdict"


def _header(document: Document, name: str) -> Html:
    source = part(document, "source")
    model = str(source.get("source") or part(part(document, "recipe"), "model").get("source"))
    facts = [f"{quantized(document.get('recipe'))} of {model}"]
    if source.get("parameters") is not None:
        facts.append(f"{_millions(source['parameters'])} parameters")
    if source.get("task"):
        facts.append(str(source["task"]))
    return tag("header", tag("h1", name), tag("p", " · ".join(facts), cls="lead"))


def _millions(count: Any) -> str:
    number = finite(count)
    return whole(count) if number is None or number < 1e6 else f"{number / 1e6:.1f} million"


def _verdict(report: Document, document: Document, number: int) -> Html:
    """What a manager reads: ship it or not, and what stands against it."""
    verdict, target = str(report.get("verdict")), str(report.get("target"))
    failing = [g for g in gates_in_order(report) if g.get("verdict") != "pass"]
    listed = [
        tag(
            "li",
            sections.badge(g.get("verdict")),
            " ",
            tag("strong", str(g.get("name"))),
            ": ",
            str(g.get("message", "")),
        )
        for g in failing
    ]
    title = tag("h3", sections.badge(verdict), tag("a", target, href=f"#target-{number + 1}"))
    text = tag("p", sentence(report, document.get("recipe")))
    return tag(
        "section",
        title,
        tag("ul", *listed) if listed else None,
        text,
        cls=f"card verdict {verdict if verdict in ('pass', 'fail') else 'inconclusive'}",
    )


def _target(report: Document, document: Document, number: int) -> Html:
    recipe = document.get("recipe")
    reports = parts(document, "reports")
    same = next(
        (i for i in range(number) if reports[i].get("modules") == report.get("modules")), None
    )
    layers: Child = sections.modules(report)
    if same is not None and report.get("modules"):
        earlier = str(reports[same].get("target"))
        link = tag("a", earlier, href=f"#target-{same + 1}")
        layers = sections.card("Error per layer", "", tag("p", "The same weights as for ", link))
    return tag(
        "section",
        tag("h2", str(report.get("target"))),
        sections.comparison(report, recipe),
        sections.quality(report, recipe),
        *(sections.quality(r, recipe, name) for name, r in further(report).items()),
        _paired(sections.latency(report, recipe)),
        _paired(sections.stages(report, recipe)),
        sections.gates(report),
        hops.ledger(report),
        layers,
        sections.fallbacks(report),
        id=f"target-{number + 1}",
    )


def _paired(cards: list[Html]) -> Html:
    """Two cards a row on a wide screen; one alone keeps the full width."""
    return tag("div", *cards, cls="pair" if len(cards) > 1 else None)


def _provenance(document: Document, reports: list[Document]) -> Html:
    """What it was made from and where it was measured."""
    source, manifest = part(document, "source"), part(document, "manifest")
    facts: list[tuple[str, Any]] = [
        (key.replace("_", " "), source.get(key))
        for key in ("source", "revision", "licence", "model_type", "architecture", "task")
    ]
    facts += [("parameters", whole(source.get("parameters")))]
    if manifest:
        facts += [
            ("bundle version", manifest.get("version")),
            ("bundle digest", manifest.get("digest")),
        ]
    packages = part(manifest, "packages") or part(manifest, "versions")
    if packages:
        facts.append(("packages", ", ".join(f"{k} {v}" for k, v in packages.items())))
    machines = _machines(reports)
    known = [(k, v) for k, v in facts if v not in (None, "")]
    listed = tag(
        "dl",
        *(
            tag(t, x)
            for k, v in (*known, *machines)
            for t, x in (("dt", k), ("dd", sections.as_line(v)))
        ),
    )
    bundle = (
        None
        if manifest
        else tag("p", "No bundle: it is made only when every gate passes.", cls="missing")
    )
    return tag(
        "section",
        tag("h2", "Provenance"),
        tag(
            "div",
            listed,
            bundle,
            _files("Source files", source.get("files")),
            _files("Bundle files", manifest.get("files")),
            details("Recipe, as resolved", tag("pre", _json(document.get("recipe")))),
            cls="card",
        ),
    )


def _machines(reports: list[Document]) -> list[tuple[str, Any]]:
    """Where each target's times were taken, and with which packages."""
    rows: list[tuple[str, Any]] = []
    for r in reports:
        speed = part(r, "speed")
        machine = part(speed, "machine")
        if machine:
            facts = {k: v for k, v in machine.items() if k not in ("packages", "runners") and v}
            facts |= {} if speed.get("threads") is None else {"threads": speed["threads"]}
            rows.append((f"measured on, {r.get('target')}", facts))
            if machine.get("packages"):
                rows.append((f"measured with, {r.get('target')}", machine["packages"]))
    return rows


def _files(title: str, files: Any) -> Html | None:
    if not isinstance(files, Mapping) or not files:
        return None
    body = [
        [tag("code", str(n)), size(f.get("size")), tag("code", str(f.get("sha256")))]
        for n, f in files.items()
        if isinstance(f, Mapping)
    ]
    return details(
        f"{title} ({len(body)})",
        table(["File", "Size", "SHA-256"], body, label=title, numbers=(1,)),
    )


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False, default=str)
