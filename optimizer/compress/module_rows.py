"""modules.json: a line of the report per weighted module."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from optimizer.foundation.qtensor import Scheme
from optimizer.recipe.compression.sparsity import Sparsity

FILE = "modules.json"


@dataclass(frozen=True)
class Row:
    """A line of modules.json: one weighted module. Errors are relative (Frobenius norm of the
    weight, L2 of the output over calibration tokens); saturation is the share of inputs clipped.
    What was not measured is null."""

    module: str
    scheme: str
    weight_error: float | None = None
    output_error: float | None = None
    saturation: float | None = None
    range: list[float] | None = None
    note: str = ""

    def explained(self, why: str) -> Row:
        """The line with `why` added to its note."""
        return replace(self, note=joined(self.note, why))


def joined(*remarks: str | None) -> str:
    """Those that are not empty, as one."""
    return "; ".join(filter(None, remarks))


def label(scheme: Scheme | None, activations: str | None, sparsity: Sparsity | None = None) -> str:
    """ "W8 channel, A8 tensor, 2:4 sparse": the scheme in the report's words. scheme None: the
    weight stays float."""
    zeros = f"{sparsity.shape} sparse" if sparsity is not None else ""
    if scheme is None:
        return joined_by_comma("float", zeros)
    inputs = f"A8 {activations}" if activations else ""
    return joined_by_comma(f"W{str(scheme).removeprefix('int')}", inputs, zeros)


def joined_by_comma(*words: str) -> str:
    """Those that are not empty, as one."""
    return ", ".join(filter(None, words))


def significant(value: float) -> float:
    """Six significant digits: more would be noise in a report."""
    return float(f"{value:.6g}")


def write(rows: Sequence[Row], folder: Path) -> None:
    """All lines, as a list."""
    document: list[dict[str, Any]] = [asdict(row) for row in rows]
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text, encoding="utf-8")


def read(folder: Path) -> list[Row]:
    """What `write` wrote."""
    return [Row(**row) for row in json.loads((folder / FILE).read_text(encoding="utf-8"))]
