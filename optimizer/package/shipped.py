"""Compare a finished bundle with the digests and the answers that validate recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import GateError
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.harness.contract import Contract
from optimizer.harness.process.child import run_python
from optimizer.harness.trust import verify
from optimizer.package.web_page import FOLDER
from optimizer.validate.judged import ANSWERS

FIX = (
    "Run again with --remeasure: the store's folders were changed after validate read them, or "
    "packaging changed what it copied."
)
SHOWN = 3  # maximum differences named in a message


def check(bundle: Path, validated: Sequence[Path]) -> None:
    """Check that a finished bundle is what validate judged. Raise GateError where a file, the
    contract or a setting has another digest than validate recorded, and where the bundle's answer
    to a judged row has other bits.

    The bundle's own harness answers, in one process per target. Where the report says why a target
    cannot answer here (`judged.answers`), only digests are compared.

    bundle: finished folder
    validated: folders of validate, per target in the recipe's order
    """
    manifest = read_manifest(bundle)
    inside = verify.parse((bundle / verify.REPORT).read_bytes(), finite=False)
    folders = [f for f, r in zip(validated, inside, strict=True) if not r["dropped"]]
    reports = [json.loads((f / verify.REPORT).read_text(encoding="utf-8")) for f in folders]
    unrecorded = [r["target"] for r in reports if not r.get("judged")]
    differences = [f"{verify.REPORT} does not record what was judged for {t}" for t in unrecorded]
    differences += verify.list_unjudged(manifest, reports) + verify.list_unjudged(manifest, inside)
    page = bundle / FOLDER / "bundle.json"
    if page.is_file() and _contract(json.loads(page.read_text("utf-8"))) != _contract(manifest):
        differences.append(
            f"the contracts in {page.relative_to(bundle)} and {verify.MANIFEST} differ"
        )
    if differences:
        raise GateError("; ".join(differences[:SHOWN]), where=str(bundle), fix=FIX)
    for engine, report, folder in zip(manifest["engines"], reports, folders, strict=True):
        if report["judged"]["answers"]["rows"]:
            _check_answers(bundle, engine["target"], folder / ANSWERS)


def _contract(document: Mapping[str, Any]) -> Contract:
    """Parse the contract in a bundle's manifest, without the quantized forms of its embeddings.

    web/bundle.json is compared with manifest.json, and does not have these forms.

    document: content of either file
    """
    contract = Contract.from_json(document["contract"])
    return replace(contract, embedding=replace(contract.vectors, quantized=None))


def _check_answers(bundle: Path, target: str, judged: Path) -> None:
    """Raise GateError if the finished bundle does not run, or answers a judged row with other bits.

    target: target of the engine
    judged: file of the judged rows and answers
    """
    code = (
        f"from pathlib import Path\nsys.path.insert(0, {str(bundle.resolve())!r})\n"
        "from harness.bundle.replay import main\n"
        f"main(Path({str(bundle.resolve())!r}), {target!r}, Path({str(judged.resolve())!r}))"
    )
    done = run_python(code, judged.parent)
    where = f"{bundle}: target {target}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise GateError(f"the bundle does not run ({last})", where=where, fix=FIX)
    document = json.loads(judged.read_text(encoding="utf-8"))
    answers: list[Any] = json.loads(done.stdout.strip().splitlines()[-1])
    both = zip(document["rows"], answers, document["answers"], strict=True)
    for i, (row, answer, expected) in enumerate(both, 1):
        if answer != expected:
            raise GateError(
                f"row {i} ({row['input']!r:.60}) gives {answer!r:.120}, and gave {expected!r:.120} "
                "when it was judged",
                where=where,
                fix=FIX,
            )
