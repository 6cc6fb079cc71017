"""Tables of a suite's figures: a row for each part, a column for each size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Cell = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One table.

    kinds: first words of the names of its parts
    column: cell -> heading of its column
    figures: cell -> its text
    """

    title: str
    kinds: tuple[str, ...]
    column: Callable[[Cell], str]
    figures: Callable[[Cell], str]


def tables(parts: Mapping[str, Any]) -> str:
    """Write the tables of a suite's parts as Markdown; a table without figures is left out.

    parts: "parts" of the suite's document
    """
    written = [write(table, parts) for table in TABLES]
    return "\n\n".join(text for text in written if text) or "No part has figures."


def write(table: Table, parts: Mapping[str, Any]) -> str:
    """Write one table; "" without figures."""
    rows: dict[str, dict[str, str]] = {}
    for name, part in parts.items():
        cells = (part.get("result") or {}).get("cells", ())
        if name.partition(":")[0] in table.kinds and cells:
            rows[name] = {table.column(cell): cell_text(table, cell) for cell in cells}
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    if not columns:
        return ""
    lines = [["part", *columns], ["---", *(["---:"] * len(columns))]]
    lines += [[name, *(row.get(c, "") for c in columns)] for name, row in rows.items()]
    return "\n".join([f"{table.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def cell_text(table: Table, cell: Cell) -> str:
    """Text of a cell: its figures, "wrong" for answers beyond the tolerance, "" if it was not
    timed."""
    if "wrong" in cell:
        return "wrong"
    return "" if "why" in cell else table.figures(cell)


def _of_encoder(cell: Cell) -> str:
    forward = f" ({cell['forward']['p50_ms']:.3f})" if "forward" in cell else ""
    return f"{cell['end_to_end']['p50_ms']:.3f}{forward}"


def _of_decoder(cell: Cell) -> str:
    times = f"{cell['first_token_ms']:.1f} / {cell['token_ms']['p50_ms']:.2f}"
    return f"{times} / {cell['tokens_per_second']:.0f}"


def _of_server(cell: Cell) -> str:
    between = cell["between_tokens_ms"]
    each = f"{between['p50']:.2f}" if between else "one token only"
    return f"{cell['first_token_ms']['p50']:.1f} / {each} / {cell['tokens_per_second']:.0f}"


TABLES: Sequence[Table] = (
    Table(
        "Encoder, batch x tokens: ms end to end (forward pass), p50",
        ("encoder",),
        lambda cell: f"{cell['batch']} x {cell['sequence']}",
        _of_encoder,
    ),
    Table(
        "Decoder, texts in a batch: ms to the first token / per token, p50 / tokens per second",
        ("decoder",),
        lambda cell: str(cell["batch"]),
        _of_decoder,
    ),
    Table(
        "Decoder over HTTP, requests at once: ms to the first token / between tokens, p50 / "
        "tokens per second",
        ("vllm", "serve"),
        lambda cell: str(cell["requests_at_once"]),
        _of_server,
    ),
)
