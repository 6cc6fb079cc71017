"""Dagster: the bundle as an asset, and its gates as a check that blocks what follows.

dagster dev -f definitions.py
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import dagster as dg

VERDICTS = {0: "pass", 3: "fail", 4: "inconclusive"}
"""By the exit code. With any other the files may be missing."""


class Run(dg.Config):
    """recipe: its file. work: a folder that is kept between runs."""

    recipe: str
    work: str = "optimize"


@dg.asset(check_specs=[dg.AssetCheckSpec("gates", asset="bundle", blocking=True)])
def bundle(config: Run) -> Iterator[dg.MaterializeResult]:
    work = Path(config.work)
    out = work / "outputs"
    places = ["--store", str(work / "store"), "--artifacts", str(work / "artifacts")]
    command = ["optimize", "step", "--outputs", str(out), *places, "--", config.recipe]
    code = subprocess.run(command).returncode
    if code not in VERDICTS:
        raise dg.Failure(f"exit code {code}", metadata={"summary": _markdown(out)})
    verdict, digest, folder = VERDICTS[code], *((out / n).read_text() for n in ("digest", "bundle"))
    metrics = json.loads((out / "metrics.json").read_text())
    yield dg.MaterializeResult(
        metadata={
            "bundle": folder,
            "digest": digest,
            "report": dg.MetadataValue.path(str(out / "report.html")),
            "summary": _markdown(out),
            **metrics,
        },
        check_results=[
            dg.AssetCheckResult(
                check_name="gates", passed=verdict == "pass", metadata={"verdict": verdict}
            )
        ],
    )


def _markdown(out: Path) -> dg.MetadataValue:
    file = out / "summary.md"
    return dg.MetadataValue.md(file.read_text() if file.exists() else "It left no summary.")


definitions = dg.Definitions(assets=[bundle])
