"""Finish a run: put the bundle in its place, publish it, and return a summary and an exit code."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from optimizer import pipeline
from optimizer.commands.build.advice import list_next_steps
from optimizer.foundation.atomic import explain_disk_errors
from optimizer.foundation.errors import GateError, InconclusiveError
from optimizer.foundation.verdicts import worst
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import ExplainedError
from optimizer.harness.inputs.boxes.boxed_image import Boxed
from optimizer.recipe.schema import Recipe
from optimizer.shared_store import Root
from optimizer.store import Step, Store

if TYPE_CHECKING:
    from optimizer.publish.stage import OpenPlace, Published

PLACE = "oci-layout:artifacts/release"  # an address that needs no registry
EXAMPLE = 100  # maximum characters of a row that is shown as an example
EXIT_CODES = {"pass": 0, "fail": GateError.exit_code, "inconclusive": InconclusiveError.exit_code}


@dataclass(frozen=True)
class RunResult:
    """Result of a run, as shown to the user.

    exit_code: exit code of the worst verdict of the bundle's targets, or of the first failed
               publication
    verdict: None where `until` stopped the run before every target was judged
    bundle: folder; None where a gate did not pass, or `until` stopped the run earlier
    example: arguments of `predict`, a row of the evaluation data; "" for the task's example
    """

    exit_code: int
    verdict: str | None
    bundle: Path | None
    report: Path | None
    steps: tuple[dict[str, Any], ...]
    document: dict[str, Any]
    summary: str
    published: tuple[Published, ...] = ()
    example: str = ""

    @property
    def runnable(self) -> bool:
        """True if an engine of the run's bundle was built and can run here."""
        from optimizer.commands.bundle.look import is_runnable

        manifest = self.document["manifest"]
        built = any(not engine["deferred"] for engine in manifest["engines"])
        return is_runnable(manifest) and built

    def as_dict(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "bundle": str(self.bundle) if self.bundle else None,
            "report": str(self.report) if self.report else None,
            "dropped": self.document.get("dropped", []),
            "steps": list(self.steps),
            "reports": self.document.get("reports", []),
            "slo": self.document.get("slo"),
            "published": [p.as_dict() for p in self.published],
        }

    @property
    def _example(self) -> str:
        """An example input, as arguments of `predict` on a command line."""
        contract = self.document["manifest"].get("contract") or {}
        return self.example or (
            tasks.find_task(contract["task"]).inputs.example if contract else ""
        )

    @property
    def text(self) -> str:
        lines = [self.summary] if self.summary else []
        lines += [p.text for p in self.published]
        if self.bundle:
            runs = [
                f"  optimize predict {self.bundle} {self._example}",
                f"  optimize bench {self.bundle}",
                f"  optimize serve {self.bundle}",
                *([] if self.published else [f"  optimize publish {self.bundle} {PLACE}"]),
            ]
            looks = [
                f"  optimize inspect {self.bundle}",
                f"  the report, for a browser: {self.bundle / 'report.html'}",
            ]
            lines += ["Next:", *(runs if self.runnable else looks[:1]), looks[1]]
        elif self.report:
            lines.append(f"No bundle was made. Full report: {self.report}")
            earlier = self.report.parent.with_suffix("")
            if earlier.is_dir():
                lines.append(f"{earlier} is the bundle of an earlier run.")
            if steps := list_next_steps(self.document.get("reports", [])):
                lines += ["Next:", *(f"  {step}" for step in steps)]
        elif self.steps:
            lines.append(f"Stopped after {self.steps[-1]['stage']}: {self.steps[-1]['path']}")
        return "\n".join(lines)


def finish(
    recipe: Recipe,
    store_root: Root,
    artifacts: Path,
    *,
    until: str,
    remeasure: bool,
    open_place: OpenPlace | None = None,
    predicted: Mapping[str, float] | None = None,
) -> RunResult:
    """Run the recipe for `optimize run`, put its result where the user looks for it, and describe
    it.

    Passed: the bundle at artifacts/<name>/<version>/, then published to the recipe's addresses. Not
    passed: the report at artifacts/<name>/<version>.failed/report.html. Both appear atomically.

    open_place: opener of the addresses; None where `until` is before publish
    predicted: {key of a step: seconds}, reported where a step takes longer
    """
    again = frozenset({"validate", "slo"}) if remeasure else frozenset[str]()
    with explain_disk_errors(artifacts, "--artifacts"):
        if artifacts.exists() and not artifacts.is_dir():  # refused now, not after hours of work
            raise NotADirectoryError(errno.ENOTDIR, "a file", str(artifacts))
    store = Store(store_root, again=again, until=until, predicted=predicted or {})
    outcome = pipeline.run(recipe, store)
    steps = tuple(store.log)
    if not outcome.built:
        return RunResult(0, None, None, None, steps, {}, "")

    from optimizer.package.report import page as html
    from optimizer.package.report.summary import summarize
    from optimizer.publish import stage
    from optimizer.publish.folder import publish, publish_failed

    document = _document(outcome.recipe, steps, outcome)
    verdict = pipeline.verdict(outcome.built)
    if outcome.slo is not None:
        verdict = worst((verdict, document["slo"]["verdict"]))
    place = artifacts, recipe.name, recipe.package.version
    bundle = report = None
    if outcome.bundle is not None and verdict == "pass":
        bundle = publish(outcome.bundle.path / "bundle", *place)
        report = bundle / "report.html"
    elif verdict != "pass":
        reports = json.dumps(document["reports"], indent=1)
        report = publish_failed(
            {"report.html": html.render(document), "report.json": reports}, *place
        )
    published: tuple[Published, ...] = ()
    if bundle is not None and store.reaches("publish"):
        assert open_place is not None
        published = stage.publish(stage.check(recipe.publish), bundle, open_place)
    code = next((p.error.exit_code for p in published if p.error), EXIT_CODES[verdict])
    summary = summarize(document)
    example = "" if bundle is None else _example(recipe, document["manifest"])
    return RunResult(code, verdict, bundle, report, steps, document, summary, published, example)


def _example(recipe: Recipe, manifest: Mapping[str, Any]) -> str:
    """Choose an example that `optimize run` shows: a row of the evaluation data as arguments of
    `predict`; "" for one that cannot be typed: an image in a column of bytes, a conversation, or a
    long text."""
    from optimizer.data.datasets import read_samples

    try:
        (row,) = read_samples(recipe.validate_.data, 1)
    except ExplainedError:  # the data are gone since the steps were made
        return ""
    task, value = tasks.find_task(recipe.model.task), row.input
    if task.fills:
        value = task.ask(Contract.from_json(manifest["contract"]), value)
    pair = row.text_pair if task.pairs_together else None
    if isinstance(value, Boxed):
        value, pair = value.image, value.as_text
    words = [str(value), *(["--pair", pair] if pair is not None else [])]
    typed = (
        isinstance(value, str | Path) and row.messages is None and max(map(len, words)) <= EXAMPLE
    )
    return shlex.join(words) if typed and all(map(str.isprintable, words)) else ""


def _document(
    recipe: Recipe, steps: tuple[dict[str, Any], ...], outcome: pipeline.Outcome
) -> dict[str, Any]:
    """Collect the data of a run's report page: see package/report/page.py."""
    from optimizer.package import on_fail
    from optimizer.package.stage import list_kept_targets, list_left_out

    packaging = recipe.packaging.model_copy(update={"left_out": outcome.left_out})
    names, targets = list_kept_targets(packaging)
    loaded = [Path(s["path"]) for s in steps if s["stage"] == "load"][-1]  # behind other sides
    reports = [_report(b.report) for b in outcome.built]
    dropped = list_left_out(packaging)
    if outcome.bundle is not None:
        reports = on_fail.mark_dropped([t.on_fail for t in targets], reports)
        dropped += on_fail.describe_dropped(names, reports)
    document: dict[str, Any] = {
        "name": recipe.name,
        "recipe": recipe.bundled.model_dump(mode="json", by_alias=True),
        "source": json.loads((loaded / "source.json").read_text()),
        "reports": reports,
        "dropped": dropped,
    }
    if outcome.bundle is not None:
        manifest = outcome.bundle.path / "bundle" / "manifest.json"
        document["manifest"] = json.loads(manifest.read_text())
    if outcome.slo is not None:
        document["slo"] = json.loads((outcome.slo.path / "slo.json").read_text("utf-8"))
        named = dict(zip(names, reports, strict=True))
        _add_gates(named[document["slo"]["target"]], document["slo"])
        if document["slo"]["verdict"] != "pass":  # the bundle stays in the store
            del document["manifest"]
    return document


def _add_gates(report: dict[str, Any], slo: dict[str, Any]) -> None:
    """Add the gates of the load test to the report of the target that served.

    report: report that `run` prints, changed in place
    slo: content of slo.json
    """
    report["gates"] = [*report["gates"], *slo["gates"]]
    report["verdict"] = worst((report["verdict"], slo["verdict"]))


def _report(step: Step) -> dict[str, Any]:
    """Return, for `optimize run`, a validate step's report, with a command that shows more in the
    message of a failed ledger.

    The command is added here and not in the file, because a store may be moved.
    """
    from optimizer.validate.ledger import explain

    file = step.path / "report.json"
    report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    command = explain.write_command(report, file)
    for gate in report["gates"]:
        if command and gate["name"] == "ledger":
            gate["message"] += f"; see {command}"
    return report
