"""Lowest drop of SmolLM2 under a limit on size, by `optimize search` and by `allocate`.

    python -m benchmarks.search.size_limit [--bits 4.6 4.7] [--work FOLDER] [--results FOLDER]

Runs the search of recipes/smollm2-search.yaml. Then the recipe with rtn, and with gptq, and
`allocate: {average_bits: B}` for every B is made and judged on the same rows of the search. Those
within the limit on size are listed with the candidates of the search; `drop` is in nats per token
above the float model, with the search's interval. One store serves all, so a second run reuses it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import results
from benchmarks.measure.results import ROOT
from optimizer.foundation.progress import say
from optimizer.recipe import file as recipe_file
from optimizer.search import candidates, search
from optimizer.search.trial import Trial, write_interval
from optimizer.search.workbench import Workbench

RECIPE = ROOT / "recipes" / "smollm2-search.yaml"
EIGHT = "{bits: 8, granularity: group, group_size: 32}"  # Q8_0; a file holds no other finer blocks


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--bits", type=float, nargs="+", default=[4.6, 4.7], help="average_bits")
    p.add_argument("--work", type=Path, default=Path("artifacts/size_limit"), help="store")
    p.add_argument("--results", type=Path, help="folder for search_size_limit.json and .md")
    options = p.parse_args()
    load, started = os.getloadavg()[0], time.process_time()
    recipe = recipe_file.read(RECIPE)
    found = search.run(recipe, options.work / "store")
    allocated = {
        f"{method} + allocate, {bits:g} bits": allocate(method, bits, options.work / "store")
        for method in ("rtn", "gptq")
        for bits in options.bits
    }
    rows = [row("search", trial) for trial in found.trials]
    rows += [row(name, trial) for name, trial in allocated.items()]
    rows.sort(key=lambda one: (one["outcome"] != "kept", one["drop"] or 0.0))
    document: dict[str, Any] = results.conditions(load, 1, "cpu")
    document |= {
        "processor_seconds": round(time.process_time() - started),
        "size_mb": found.section.constraints.size_mb,
        "winner": found.winner.label if found.winner else None,
        "candidates": rows,
    }
    page = show(document)
    if options.results:
        results.write(document, page, options.results, "search_size_limit")
    else:
        print(page)


def allocate(method: str, bits: float, store: Path) -> Trial:
    """Make, and judge on the search's rows, the recipe with bits by sensitivity."""
    say(f"size_limit: {method} with allocate at {bits:g} bits")
    changes = [
        f"quantize.methods=[{method}]",
        f"quantize.allocate={{average_bits: {bits}, choices: [{EIGHT}]}}",
        f"search.over={{method: [{method}], precision: recipe}}",
    ]
    recipe = recipe_file.read(RECIPE, changes)
    first = candidates.list_candidates(recipe)[0]
    bench = Workbench(recipe, store, first)
    bench.prepare()
    return bench.try_(first, None)


def row(name: str, trial: Trial) -> dict[str, Any]:
    return {
        "by": name,
        "candidate": trial.label,
        "outcome": trial.outcome,
        "why": trial.why,
        "mb": None if trial.size is None else trial.size / 1e6,
        "drop": trial.drop,
        "interval": trial.drop_interval,
    }


def show(document: dict[str, Any]) -> str:
    """Page with the figures."""
    rows = [
        [
            one["by"],
            one["candidate"],
            one["outcome"],
            "" if one["mb"] is None else f"{one['mb']:.1f}",
            "" if one["drop"] is None else write_interval(one["drop"], one["interval"], 4),
        ]
        for one in document["candidates"]
    ]
    heads = ["by", "candidate", "outcome", "MB", "nats above float"]
    return f"""# SmolLM2 in at most {document["size_mb"]:g} MB

Made by `python -m benchmarks.search.size_limit`. The search found: {document["winner"]}.

{results.table(heads, rows)}

{document["when"]}, {document["machine"]["cpu"]};
{document["processor_seconds"]} s of processor time in this run, which reuses steps of earlier runs.
"""


if __name__ == "__main__":
    main()
