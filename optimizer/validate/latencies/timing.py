"""Times models of other sizes beside the whole one, each once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from optimizer.data.datasets import samples
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import NEUTRAL
from optimizer.recipe.schema import Latencies
from optimizer.reduce.structure import latency_table
from optimizer.reduce.structure.latency_table import ATTEMPTS, Timed
from optimizer.reduce.structure.layout import Layout
from optimizer.reduce.structure.sizes import Sizes
from optimizer.timing.rounds import Settling
from optimizer.validate.latencies.form import model_of
from optimizer.validate.speed.gain import Built, Cell, Until

SIZES = 9  # of the table, at most (latency_table.grid)
Compared = Callable[[Built, Built, Until], Mapping[str, Any]]
"""As Cell.compared."""


def cell(section: Latencies) -> Cell:
    """What is timed."""
    data = section.latency.data
    texts = [row.text for row in samples(data)] if data else list(NEUTRAL)
    return Cell(section.target, section.latency, texts, section.reduce.gain_over)


def place(section: Latencies, source: Path) -> dict[str, int]:
    """{"batch", and "sequence" or "prompt"} of it."""
    contract = contracts.read(source / "contract.json")
    second = "prompt" if tasks.of(contract).generates else "sequence"
    return dict(zip(("batch", second), cell(section).of(contract), strict=True))


@dataclass(frozen=True)
class Bench:
    """layout: of the reference; whole: its model; beside: what all are timed beside, that or the
    reference in float; progress: the folder where what was timed is kept; compared: what times."""

    section: Latencies
    layout: Layout
    whole: Built
    beside: Built
    progress: Path
    compared: Compared

    def entry(self, sizes: Sizes) -> Timed:
        """Of the table."""
        return self._timed(sizes, "table", SIZES)

    def confirmed(self, sizes: Sizes) -> Timed:
        """What was chosen from it, timed again where it is of the table as well."""
        return self._timed(sizes, "confirmed", ATTEMPTS)

    def _timed(self, sizes: Sizes, what: str, shared: int) -> Timed:
        """Until it is known to within the tolerance of the gain, or an equal share of
        latency.max_seconds is spent. shared: by how many."""
        name = "-".join(map(str, (what, *asdict(sizes).values())))
        file, folder = self.progress / f"{name}.json", self.progress / "smaller"
        if file.exists():
            return latency_table.timed(json.loads(file.read_text(encoding="utf-8")))
        shutil.rmtree(folder, ignore_errors=True)
        built = self.whole
        if sizes != self.layout.model.full:
            built = model_of(self.section, self.layout, sizes, folder)
        share, seconds = self.section.reduce.gain_tolerance, self.section.latency.max_seconds
        known = self.compared(self.beside, built, Settling(share, seconds / shared))
        low, high = known["interval"]
        timed = Timed(sizes, known["ratio"], (low, high), known["runs"], known["p50"])
        write(file, timed.as_dict())
        shutil.rmtree(folder, ignore_errors=True)
        return timed


def write(file: Path, document: Mapping[str, Any]) -> None:
    """As JSON, whole or not at all."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.rename(file)
