"""Run `make demo`'s recipe from an empty store and record its figures, which the README quotes.

    python -m benchmarks.encoders.demo

Writes demo.json and demo.md to --results. The table is that of the bundle's report; README.md has
the same lines (tests/house/test_readme.py compares them). Ends with the exit code of the run where
its gates do not pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure.results import RESULTS, ROOT, conditions, table, write
from optimizer.package.report.comparison import TableEntry
from optimizer.package.report.rows import build_rows

RECIPE = "recipes/minilm-int8.yaml"


def figures(report: Mapping[str, Any]) -> str:
    """Format the comparison of a report, float | INT8 | change, as a Markdown table."""
    body = [
        [row.name, *(_cell(c) for c in (row.before, row.after, row.change))]
        for row in build_rows(report)
        if not row.unmeasured
    ]
    return table(["", "float", "INT8", "change"], body)


def _cell(entry: TableEntry) -> str:
    return f"{entry.text} ({entry.note})" if entry.note else entry.text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    load, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        places = ["--store", f"{folder}/store", "--artifacts", f"{folder}/artifacts"]
        ended = subprocess.run([sys.executable, "-m", "optimizer", RECIPE, *places], cwd=ROOT)
        if ended.returncode:
            sys.exit(ended.returncode)
        (bundle,) = Path(folder, "artifacts").glob("*/1/report.json")
        report = json.loads(bundle.read_text())[0]
    iterations = report["speed"]["cells"][0]["runs"]
    result = {
        **conditions(load, iterations, "wall"),
        "command": f"optimize {RECIPE}",
        "seconds": round(time.monotonic() - started),
        "gates": {gate["name"]: gate["verdict"] for gate in report["gates"]},
        "table": figures(report).split("\n"),
    }
    flags = ", ".join(result["machine"]["flags"])
    page = (
        "# The figures of `make demo`\n\n"
        f"Made by `python -m benchmarks.encoders.demo` on {result['when']}: {RECIPE} from an empty "
        f"store, {result['seconds']} s, on {os.cpu_count()} cores ({flags}), "
        f"load average {load:.1f} before.\n\n{figures(report)}\n"
    )
    write(result, page, args.results, "demo")


if __name__ == "__main__":
    main()
