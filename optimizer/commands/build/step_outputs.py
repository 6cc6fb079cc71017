"""Write the files that CI tools read about a run: in one folder, and where one tool reads them.

    result.json      output of `--json`        summary.md       for a person, in Markdown
    verdict          pass, fail, inconclusive, or error
    exit_code        0 to 5                    digest, bundle   of the bundle; empty without one
    metrics.json     {name: number}            metrics.prom     the same as Prometheus's text
    junit.xml        a test case per gate      report.html      where gates were judged
    run_id           the run that wrote them

All are written when a run ends, also after an error. Files of an earlier run are removed first and
the verdict is written last, so a killed run leaves no verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.commands.build import step_formats
from optimizer.foundation import atomic
from optimizer.foundation.errors import RecipeError
from optimizer.harness.shown import escape_lines, scrub, scrub_document
from optimizer.package.report.metrics import list_metrics

VALUES = ("verdict", "exit_code", "digest", "bundle")
"""Files that hold one value without a newline, as Argo, Tekton and KFP read them."""
FILES = (
    *("verdict", "exit_code", "digest", "bundle", "run_id", "optimize.env"),
    *("result.json", "metrics.json", "metrics.prom", "junit.xml", "summary.md", "report.html"),
)
"""Every file that a run may leave, in the order of removal: the verdict first."""
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Line ends of any kind, and other control characters."""


@dataclass(frozen=True)
class Ended:
    """End of a run, as a CI system gets it.

    document: output of `--json`
    text: the same for a person
    """

    exit_code: int
    verdict: str
    document: Mapping[str, Any]
    text: str
    bundle: Path | None = None
    report: Path | None = None
    digest: str = ""

    def value(self, name: str) -> str:
        return str(getattr(self, name) or "") if name != "exit_code" else str(self.exit_code)


def check_value(where: str, value: str) -> None:
    """Check an output of `optimize step`: raise RecipeError for a value that is not one line."""
    if BREAKS.search(value):
        raise RecipeError(
            f"{value!a:.200} contains a line end or another control character",
            where=where,
            accepted="text on one line, because CI tools read one value per line",
            fix="Choose another name.",
        )


def remove(folder: Path) -> None:
    """Remove the files that an earlier `optimize step` wrote, and no other file."""
    with atomic.explain_disk_errors(folder, "--outputs"):
        for name in FILES:
            (folder / name).unlink(missing_ok=True)


def write(ended: Ended, folder: Path, run_id: str) -> None:
    """Write the outputs of a run for a CI system, one file each, into the folder, which is created
    if missing; the verdict last.

    run_id: name of the run, one line

    Raises RecipeError for a value of several lines.
    """
    values = {name: ended.value(name) for name in VALUES}
    for name, value in values.items():
        check_value(f"outputs of the step: {name}", value)
    with atomic.explain_disk_errors(folder, "--outputs"):
        folder.mkdir(parents=True, exist_ok=True)
        flat = list_metrics(ended.document.get("reports", []))
        document = {**ended.document, "run_id": run_id}
        if ended.report is not None and ended.report.is_file():
            atomic.write(folder / "report.html", ended.report.read_bytes())
        texts = {
            "run_id": run_id,
            "result.json": json.dumps(scrub_document(document), indent=1),
            "metrics.json": json.dumps(flat, indent=1, sort_keys=True),
            "metrics.prom": step_formats.prometheus(flat),
            "junit.xml": step_formats.junit(ended.document),
            "summary.md": step_formats.markdown(
                ended.verdict, ended.digest, escape_lines(ended.text)
            ),
        }
        for name in reversed(VALUES):
            texts[name] = values[name]
        for name, text in texts.items():
            atomic.write(folder / name, scrub(text).encode("utf-8", "backslashreplace"))


def _github(ended: Ended, folder: Path, outputs: Path | None, summary: Path | None) -> None:
    """Append, for GitHub, outputs of `optimize step` and a section of the job's page."""
    if outputs is not None:
        lines = [f"{name}={ended.value(name)}\n" for name in VALUES]  # checked by `write`
        with outputs.open("a", encoding="utf-8") as f:
            f.write("".join(lines))
    if summary is not None:
        with summary.open("a", encoding="utf-8") as f:
            f.write((folder / "summary.md").read_text(encoding="utf-8"))


def _gitlab(ended: Ended, folder: Path, outputs: Path | None, summary: Path | None) -> None:
    """Write for GitLab's CI optimize.env for artifacts:reports:dotenv: variables of later jobs."""
    del outputs, summary
    lines = [f"OPTIMIZE_{name.upper()}={ended.value(name)}\n" for name in VALUES]
    atomic.write(folder / "optimize.env", "".join(lines).encode())


def _files(ended: Ended, folder: Path, outputs: Path | None, summary: Path | None) -> None:
    """Do nothing more at `optimize step`: the files in the folder are all that this tool reads."""
    del ended, folder, outputs, summary


CHANNELS: dict[str, Callable[[Ended, Path, Path | None, Path | None], None]] = {
    "github": _github,
    "gitlab": _gitlab,
    "argo": _files,
    "tekton": _files,
    "kfp": _files,
}
"""{CI tool: function that writes what it needs besides the files}"""
