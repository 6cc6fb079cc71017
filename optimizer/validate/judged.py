"""Record the judged files and settings, which a bundle must match: the report's `judged`.

    model, engine    {file name: sha256} of the lowered model and of the built engine
    tokenizer        {file name: sha256} of the tokenizer files that the harness opens
    adapters         {file name: sha256} of the adapters' matrices; absent without any
    contract, opened_with   sha256 of their canonical JSON: harness/trust/verify.py, judged_settings
    answered_by      {file name: sha256} of the model that answered for quality; null where none
                     did, or its runner does not name its file
    answers          {rows, why}: number of rows that the packaged bundle answers again, or why it
                     answers none

The rows and their answers (harness/bundle/replay.py) are in answers.json beside the report, for
stage `package` alone: rows of an evaluation set are not shipped.
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
from optimizer.harness.contract import adapter_file
from optimizer.harness.inputs.boxes.boxed_image import Boxed
from optimizer.harness.inputs.tensors import TensorRow
from optimizer.harness.runtimes import table
from optimizer.harness.trust.verify import digest_judged_settings
from optimizer.store import digest_file
from optimizer.validate import target_runner
from optimizer.validate.run_artifacts import RunArtifacts

ANSWERS = "answers.json"
ROWS = 4
OFF_THE_CPU = (
    "only its files are compared: on this device another process may choose kernels that round "
    "differently"
)


def record(
    m: RunArtifacts, rows: Sequence[Sample], answered_by: dict[str, str] | None, out: Path
) -> dict[str, Any]:
    """Write answers.json into `out` where the bundle's answers can be compared later, and return
    the report's section `judged`.

    rows: rows of validate.data
    answered_by: {file name: sha256} of the model that answered them, from digest_files; None:
        unknown
    out: folder of stage validate
    """
    why = _why_not_answered(m)
    if not why:
        some = _sample(m, rows)
        with closing(target_runner.open_engine(m)) as runner:
            answers = replay.replay_answers(m.contract, m.encoder, runner, some)
        text = json.dumps({"rows": some, "answers": answers})
        (out / ANSWERS).write_text(text, encoding="utf-8")
    return {
        **files(m, out),
        "answered_by": answered_by,
        "answers": {"rows": 0 if why else len(some), "why": why},
    }


def files(m: RunArtifacts, out: Path | None = None) -> dict[str, Any]:
    """Return the report's section `judged` without the fields on answers.

    out: folder of stage validate, which may hold a contract; None: the contract of load
    """
    target, inspected = m.section.target, m.inspected
    contract = read_contract(m.source, out)
    built = [inspected.get(name) for name in ("engine", "timing_cache")]
    opened = [contract["tokenizer"], contract.get("embedding")]
    names = [section["file"] for section in opened if section and section.get("file")]
    adapters = [m.source / adapter_file(n) for n in m.contract.adapters]
    engine = {
        "runtime": target.runtime,
        "device": target.device,
        "provider": target.execution_provider,
        "threads": target.intra_op_threads,
        "fit": inspected.get("fit"),
    }
    return {
        "model": _digests(targets.look_up(target.runtime).model_files(m.model)),
        "engine": _digests([m.engine / name for name in built if name]),
        "tokenizer": _digests([m.source / "checkpoint" / name for name in names]),
        **({"adapters": _digests(adapters)} if adapters else {}),
        **digest_judged_settings(contract, engine),
    }


def read_contract(source: Path, validated: Path | None) -> dict[str, Any]:
    """Read contract.json: that of validate, which adds measured fields, else that of load.

    source: folder of load
    validated: folder of validate; None: it is not read
    """
    own = None if validated is None else validated / "contract.json"
    file = own if own is not None and own.is_file() else source / "contract.json"
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return document


def digest_files(m: RunArtifacts, runner: Any) -> dict[str, str] | None:
    """Return {file name: sha256} of the files that a runner has open; None where the runner has no
    attribute `model` that names its file."""
    file = getattr(runner, "model", None)
    if not isinstance(file, Path):  # a runner of another distribution
        return None
    if file.name == m.inspected.get("engine"):
        return _digests([file])
    return _digests(targets.look_up(m.section.target.runtime).model_files(file.parent))


def _digests(paths: Sequence[Path]) -> dict[str, str]:
    return {path.name: digest_file(path) for path in paths}


def _why_not_answered(m: RunArtifacts) -> str:
    """Explain why `package` cannot compare the bundle's answers with recorded ones; "" where it
    can. Reasons: the harness does not run the runtime, this machine cannot run it, or the target is
    not on the CPU."""
    section = m.section.target
    runtime = table.look_up(section.runtime)
    if not runtime.runs:
        return f"the harness does not run {section.runtime}" + (
            f", which {runtime.served_by} serves" if runtime.served_by else ""
        )
    return target_runner.explain_not_run(m) or ("" if section.device == "cpu" else OFF_THE_CPU)


def _sample(m: RunArtifacts, rows: Sequence[Sample]) -> list[dict[str, Any]]:
    """Choose ROWS rows, evenly by size, and return each as {"input", "pair"} in JSON types: the
    form that replay.replay_answers reads."""
    task = tasks.look_up(m.contract)
    ordered = sorted(rows, key=lambda r: task.inputs.extent(r.input))
    at = np.unique(np.linspace(0, len(ordered) - 1, ROWS).round().astype(int))
    chosen = [ordered[i] for i in at]
    paired = task.pairs_together and any(r.text_pair for r in chosen)
    sampled = []
    for row in chosen:
        value, pair = task.ask(m.contract, row.input), row.text_pair if paired else None
        if isinstance(value, Boxed):
            value, pair = value.image, value.as_text
        sampled.append({"input": _plain(value), "pair": pair})
    return sampled


def _plain(value: Any) -> Any:
    """Convert an input of a judged row to JSON, which is given to the bundle's harness later: a
    text, the bytes of an image's file, or arrays."""
    if isinstance(value, TensorRow):
        return {"arrays": {name: array.tolist() for name, array in value.items()}}
    if isinstance(value, Path):
        value = value.read_bytes()
    return {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
