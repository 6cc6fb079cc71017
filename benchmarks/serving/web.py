"""Time a bundle's page in headless Chromium: its first answer, and INT8 beside float in one page.

    python -m benchmarks.serving.web artifacts/minilm-int8-web/1

The bundle includes the float model (include_float: true). Files come over loopback without a cache,
so that the time of the first answer includes reading them, checking their digests, opening the
model and the self-check. Both models answer the same text in turns, in an order that alternates.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure.chromium import Chromium, program
from benchmarks.measure.results import RESULTS, machine
from optimizer.harness.bundle.bench import compare_times, percentile, percentile_interval
from optimizer.harness.commands.web import PageServer, find_pages

TEXT = "The service was quick and the staff could not have been friendlier."
FIRST = f"page.ready.then(() => page.ask({json.dumps(TEXT)})).then(() => performance.now())"


def measured(bundle: Path, threads: list[int], loads: int, rounds: int) -> dict[str, Any]:
    """Measure {"first": ms of each load, "first_cpu": seconds, "cells": [...]}.

    A cell has threads, tokens, ratio, and ms of each round as "quantized" and "float".
    """
    document: dict[str, Any] = {"first": [], "first_cpu": [], "cells": []}
    with PageServer(find_pages(bundle)) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = Chromium(Path(profile), timeout=600)
        document["browser"] = browser.evaluate("navigator.userAgent")
        for _ in range(loads):
            browser.leave()
            before = browser.processor_seconds()
            browser.open(f"{server.address}?threads={threads[0]}")
            document["first"].append(browser.evaluate(FIRST))
            document["first_cpu"].append(browser.processor_seconds() - before)
        for count in threads:
            browser.open(f"{server.address}?threads={count}")
            browser.evaluate("page.complete")
            for repeated in (1, 9):
                text = json.dumps(" ".join([TEXT] * repeated))
                answers = browser.evaluate(f"page.ask({text})")
                times = browser.evaluate(f"page.measure({text}, {rounds})")
                cell = {"threads": count, "tokens": answers["quantized"]["tokens"], **times}
                cell["ratio"] = compare_times(times["quantized"], times["float"])
                document["cells"].append(cell)
                print(cell["threads"], cell["tokens"], cell["ratio"], file=sys.stderr)
        browser.close()
        server.shutdown()
    return document


def page(document: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    low, high = percentile_interval(document["first"], 50)
    machine = document["machine"]
    lines = [
        "# In a browser",
        "",
        f"`python -m benchmarks.serving.web {document['bundle']}`, {document['date']}, "
        f"{machine['cpu']}, "
        f"{machine['cores']} cores, load average {document['load']:.1f} when it began. "
        f"{document['browser']}. Medians of {len(document['cells'][0]['float'])} rounds, 95 % "
        "intervals.",
        "",
        f"From the address to the first answer, files over loopback: median of "
        f"{len(document['first'])} loads {percentile(document['first'], 50) / 1e3:.2f} s "
        f"({_seconds(low)} to {_seconds(high)}), in which the browser had "
        f"{percentile(document['first_cpu'], 50):.2f} CPU s.",
        "",
        "| threads | tokens | float, ms | INT8, ms | INT8 of float |",
        "|---|---|---|---|---|",
    ]
    for cell in document["cells"]:
        low, high = cell["ratio"]["interval"]
        lines.append(
            f"| {cell['threads']} | {cell['tokens']} | {percentile(cell['float'], 50):.1f} | "
            f"{percentile(cell['quantized'], 50):.1f} | {cell['ratio']['median']:.2f} "
            f"({low:.2f} to {high:.2f}) |"
        )
    return "\n".join([*lines, ""])


def _seconds(milliseconds: float | None) -> str:
    return "?" if milliseconds is None else f"{milliseconds / 1e3:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--loads", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=RESULTS / "web")
    args = parser.parse_args()
    if program() is None:
        print("chromium is not installed: apt-get install chromium", file=sys.stderr)
        return 5
    document = {
        "bundle": str(args.bundle),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "load": os.getloadavg()[0],
        **measured(args.bundle, args.threads, args.loads, args.rounds),
    }
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(page(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
