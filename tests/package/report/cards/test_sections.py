"""Tests of the report's cards of modules."""

from __future__ import annotations

from optimizer.package.report.cards import sections
from tests.package.report import documents


def test_modules_that_read_no_inputs_are_drawn_by_the_error_of_their_weights() -> None:
    read = documents.modules()
    rounded = [{**m, "output_error": None} for m in read]
    by_output, by_weight = (sections.modules({"modules": m}) for m in (read, rounded))
    assert "each module's output" in by_output.hint
    assert "each module's weight" in by_weight.hint
    assert by_weight.chart is not None
    assert by_weight.chart != by_output.chart
