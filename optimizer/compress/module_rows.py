"""Read and write modules.json, the report's rows of weighted modules."""

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
class ModuleRow:
    """One weighted module in the report's table that compress writes; values that were not measured
    are None.

    weight_error, output_error: relative (Frobenius norm of the weight, L2 of the output over
        calibration tokens)
    saturation: share of clipped inputs
    """

    module: str
    scheme: str
    weight_error: float | None = None
    output_error: float | None = None
    saturation: float | None = None
    range: list[float] | None = None
    note: str = ""

    def explained(self, why: str) -> ModuleRow:
        """The module's row with `why` added to its note."""
        return replace(self, note=join_remarks(self.note, why))


def join_remarks(*remarks: str | None) -> str:
    """Join the non-empty remarks of compression methods on a module by semicolons."""
    return "; ".join(filter(None, remarks))


def label(scheme: Scheme | None, activations: str | None, sparsity: Sparsity | None = None) -> str:
    """Name a module's formats in the report: "W8 channel, A8 tensor, 2:4 sparse", "W FP8 channel".

    scheme: None: the weight stays float
    """
    zeros = f"{sparsity.shape} sparse" if sparsity is not None else ""
    if scheme is None:
        return ", ".join(filter(None, ["float", zeros]))
    weights = str(scheme).replace("int", "W", 1).replace("float", "W FP", 1)
    inputs = f"A8 {activations}".replace("A8 float", "A FP") if activations else ""
    return ", ".join(filter(None, [weights, inputs, zeros]))


def round_significant(value: float) -> float:
    """Round an error of a compressed module to six significant digits for the report."""
    return float(f"{value:.6g}")


def write(rows: Sequence[ModuleRow], folder: Path) -> None:
    """Write the report's rows on modules to modules.json in `folder`."""
    document: list[dict[str, Any]] = [asdict(row) for row in rows]
    text = json.dumps(document, indent=1, ensure_ascii=False)
    (folder / FILE).write_text(text, encoding="utf-8")


def read(folder: Path) -> list[ModuleRow]:
    """Read modules.json of a compress step: the rows on modules that the report shows."""
    return [ModuleRow(**row) for row in json.loads((folder / FILE).read_text(encoding="utf-8"))]
