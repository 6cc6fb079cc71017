"""Every case about bundles. `python -m tests.hostile.written.bundles [WORD ...]` runs them, or
those whose names hold a word, and prints what ended badly."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.hostile.archive_cases import of_tars
from tests.hostile.bundle_cases import (
    of_contents,
    of_extra_files,
    of_files,
    of_ledger,
    of_manifest,
)
from tests.hostile.cases import Case, Good, make
from tests.hostile.request_cases import of_lines


def every(good: Good, work: Path) -> list[Case]:
    return [
        *of_manifest(good.encoder, "manifest"),
        *(c for c in of_manifest(good.decoder, "decoder") if ".generation" in c.name),
        *of_files(good.encoder),
        *of_extra_files(good.encoder),
        *of_ledger(good.encoder),
        *of_contents(good),
        *of_tars(good.tar, work),
        *of_lines(good),
    ]


def main() -> int:
    """Run all of them; 1 when one ended badly."""
    with tempfile.TemporaryDirectory() as folder:
        cases = every(make(Path(folder)), Path(folder))
        wanted = sys.argv[1:]
        cases = [c for c in cases if not wanted or any(w in c.name for w in wanted)]
        start, bad, slowest = time.monotonic(), 0, (0.0, "")
        for case in cases:
            begun = time.monotonic()
            problem = case.run()
            slowest = max(slowest, (time.monotonic() - begun, case.name))
            if problem:
                bad += 1
                print(f"{case.name}: {problem}\n")
        print(f"{len(cases)} cases, {bad} bad, {time.monotonic() - start:.0f} s; slowest {slowest}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
