"""The table of runtimes agrees with the code that opens them."""

from optimizer.harness.bundle.engines import OPENERS
from optimizer.harness.runtimes.table import RUNTIMES


def test_every_runtime_that_the_harness_runs_has_an_opener() -> None:
    assert {*OPENERS} == {name for name, runtime in RUNTIMES.items() if runtime.runs}
