"""The report's `judged`: the files and settings that were judged, to which a bundle is held.

    model, engine    {file name: sha256} of the lowered model, and of the built engine
    tokenizer        {file name: sha256} of what the harness opens of it
    contract, opened_with   sha256 of their canonical JSON: harness/trust/verify.py, judged_settings
    answered_by      {file name: sha256} of what answered for quality; null where nothing did, or
                     it does not say which file it has open
    answers          {rows, why}: how many rows are answered again by the packaged bundle, or why
                     none are

The rows and their answers (harness/bundle/replay.py) are in answers.json beside the report, for the
stage package alone: rows of an evaluation set are not shipped.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from optimizer import targets
from optimizer.data.datasets import Sample
from optimizer.harness import tasks
from optimizer.harness.bundle import replay
from optimizer.harness.runtimes import table
from optimizer.harness.trust.verify import judged_settings
from optimizer.store import digest_file
from optimizer.validate import target_runner
from optimizer.validate.run_artifacts import RunArtifacts

ANSWERS = "answers.json"
ROWS = 4
OFF_THE_CPU = (
    "only its files are compared: another process may choose other kernels on this device, which "
    "round otherwise"
)


def record(
    m: RunArtifacts, rows: Sequence[Sample], answered_by: dict[str, str] | None, out: Path
) -> dict[str, Any]:
    """See the module's docstring; writes answers.json into `out`. rows: of validate.data;
    answered_by: as `files_of` has them."""
    why = _not_answered(m)
    if not why:
        some = _some(m, rows)
        with closing(target_runner.open_engine(m)) as runner:
            answers = replay.answers(m.contract, m.encoder, runner, some)
        text = json.dumps({"rows": some, "answers": answers})
        (out / ANSWERS).write_text(text, encoding="utf-8")
    return {
        **files(m),
        "answered_by": answered_by,
        "answers": {"rows": 0 if why else len(some), "why": why},
    }


def files(m: RunArtifacts) -> dict[str, Any]:
    """The part of the record that holds digests."""
    target, inspected = m.section.target, m.inspected
    contract = json.loads((m.source / "contract.json").read_text(encoding="utf-8"))
    built = [inspected.get(name) for name in ("engine", "timing_cache")]
    tokenizer = contract["tokenizer"]
    names = [] if tokenizer is None else [tokenizer["file"]]
    engine = {
        "runtime": target.runtime,
        "device": target.device,
        "provider": target.execution_provider,
        "threads": target.intra_op_threads,
        "fit": inspected.get("fit"),
    }
    return {
        "model": _digests(targets.of(target.runtime).model_files(m.model)),
        "engine": _digests([m.engine / name for name in built if name]),
        "tokenizer": _digests([m.source / "checkpoint" / name for name in names]),
        **judged_settings(contract, engine),
    }


def files_of(m: RunArtifacts, runner: Any) -> dict[str, str] | None:
    """{file name: sha256} of what a runner has open; None where it does not say."""
    file = getattr(runner, "model", None)
    if not isinstance(file, Path):  # a target from outside may answer with anything
        return None
    if file.name == m.inspected.get("engine"):
        return _digests([file])
    return _digests(targets.of(m.section.target.runtime).model_files(file.parent))


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    return {path.name: digest_file(path) for path in paths}


def _not_answered(m: RunArtifacts) -> str:
    """Why the packaged bundle's answers cannot be compared here, or ""."""
    section = m.section.target
    runtime = table.of(section.runtime)
    if not runtime.runs:
        return f"the harness does not run {section.runtime}" + (
            f", which {runtime.served_by} serves" if runtime.served_by else ""
        )
    return target_runner.why_not_run(m) or ("" if section.device == "cpu" else OFF_THE_CPU)


def _some(m: RunArtifacts, rows: Sequence[Sample]) -> list[dict[str, Any]]:
    """ROWS rows of all sizes, as replay.answers takes them."""
    task = tasks.of(m.contract)
    ordered = sorted(rows, key=lambda r: task.inputs.extent(r.input))
    at = np.unique(np.linspace(0, len(ordered) - 1, ROWS).round().astype(int))
    chosen = [ordered[i] for i in at]
    paired = task.pairs_together and any(r.text_pair for r in chosen)
    return [{"input": _plain(r.input), "pair": r.text_pair if paired else None} for r in chosen]


def _plain(value: Any) -> Any:
    """An input as JSON: a text, or the bytes of an image's file."""
    if isinstance(value, Path):
        value = value.read_bytes()
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
