"""Card of the forms of embeddings: bytes of a vector, and the quality of a search with it."""

from __future__ import annotations

from optimizer.package.report.comparison import Document, get_part, get_parts
from optimizer.package.report.figures import interval, level, size, whole
from optimizer.package.report.view import Card, Line, ReportTable, figure, figures, line, small


def build_cards(report: Document) -> tuple[Card, ...]:
    """Return the report's card on the search quality of embeddings in each form; () where no forms
    were judged."""
    section = get_part(report, "embeddings")
    if not section:
        return ()
    k, times = whole(section.get("k")), section.get("oversampling")
    labels = "named in the data" if section.get("labelled") else f"the float model's first {k}"
    hint = f"{whole(section.get('queries'))} queries search {whole(section.get('documents'))} "
    hint += f"documents; the relevant documents are {labels}. "
    hint += (
        f"The stored vectors fetch {whole(times)} × {k} documents; the float query reranks them "
        f"to {k}."
        if times != 1
        else "Documents are ranked by the stored vectors, without reranking."
    )
    write, before = level("ndcg"), get_part(section, "float")
    names = ("recall", "ndcg")
    first = (
        line("float32", *small(f"{whole(before.get('dimensions'))} numbers, float model")),
        line(figure(size(before.get("bytes")))),
        *figures(*(write(before.get(name)) for name in names)),
        *figures("", ""),
    )
    body = [first, *(_form(form) for form in get_parts(section, "forms"))]
    heads = ("Vector", "Bytes", f"Recall@{k}", "nDCG@10", "Recall, not rescored", "nDCG")
    title = "Search with these vectors"
    return (Card(title, hint, tables=(ReportTable(title, heads, tuple(body), (1, 2, 3, 4, 5)),)),)


def _form(form: Document) -> tuple[Line, ...]:
    write, plainly = level("ndcg"), get_part(form, "without_rescoring")
    columns = []
    for name in ("recall", "ndcg"):
        judged = get_part(form, name)
        bounds = interval(get_part(judged, "difference").get("interval"), write)
        columns.append(
            line(
                figure(write(get_part(judged, "candidate").get("value"))),
                *small(f"change {bounds}" if bounds else ""),
            )
        )
    head = line(str(form.get("type")), *small(f"{whole(form.get('dimensions'))} numbers"))
    last = figures(*(write(plainly.get(key)) for key in ("recall", "ndcg")))
    return (head, line(figure(size(form.get("bytes")))), *columns, *last)


def describe_forms(report: Document) -> str:
    """Write for the report how many bytes an embedding takes in each form (type and number of
    dimensions); "" without forms."""
    section = get_part(report, "embeddings")
    forms = [
        f"{whole(form.get('bytes'))} for {form.get('type')} with {whole(form.get('dimensions'))} "
        "numbers"
        for form in get_parts(section, "forms")
    ]
    if not forms:
        return ""
    stored = whole(get_part(section, "float").get("bytes"))
    return f"Bytes per vector: {stored} for the float model, {', '.join(forms)}."
