"""Write web/ into a bundle: a page that runs the model in a browser, after it compared its outputs
with recorded ones.

    web/index.html  *.mjs          from package/web/
    web/onnxruntime-web/  tokenizers/   npm packages, as fetched by build
    web/float/                     the float model, with include_float
    web/bundle.json                version; name; contract; threads; output that the task reads;
        models   {"quantized" | "float": {model, external: [files], limit: of the distance of an
                 output, outputs: [{dims, data: float32, base64} | null], answers: [answer | null]}}
        characters   signatures of characters: web_characters.py
        check    [{text, ids}]: texts and their tokens; null above where only these are compared
        files    {name: {sha256, size}} of files that the page reads

Outputs and answers come from the harness on this processor. Limits come from the ledger: distance
between correct runs of this model, measured by validate.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks import build_answers, decode, encode
from optimizer.lower.web.lower import FLOAT
from optimizer.package import web_characters
from optimizer.store import digest_file
from optimizer.targets.record import Packed

PAGE = Path(__file__).parent / "web"
FOLDER = "web"
TEXTS = (
    "The service was quick and the staff could not have been friendlier.",
    "It cost 1,299.50 dollars (plus tax) in 2024; was that worth it?!",
    "ΟΔΟΣ, τέλος! Crème brûlée, naïve façades, Ångström, Straße, İstanbul, señor: ﬁne.",
    "東京は晴れ、서울은 흐림, 北京下雨。 Москва́, ελληνικά, हिन्दी, عربي.",
    "a\tb\n\nc  d\u00a0e\u200bf 👩‍🔬🇪🇺 ½ №5 … “quoted” — don’t",
)
"""Letters, numbers, accents in both forms, scripts with and without spaces, invisible marks."""
WORDS = 10  # TEXTS[0] has more; it is repeated to make a text above the maximum length


def add(part: Packed) -> None:
    """Write the folder web/ into a bundle.

    Writes nothing if build deferred fetching the npm packages (on_missing: defer).

    Raises OptimizeError if the report has no limit for an output that the page compares.
    """
    web = part.bundle / FOLDER
    if not (part.built / FOLDER).is_dir():
        say("package: web/ is not written, because onnxruntime-web was not fetched")
        return
    shutil.copytree(part.built / FOLDER, web)
    for path in sorted(PAGE.iterdir()):
        shutil.copyfile(path, web / path.name)
    models: dict[str, tuple[list[str], str]] = {"quantized": (part.entry["model_files"], "engine")}
    if (part.lowered / FLOAT).is_dir():
        shutil.copytree(part.lowered / FLOAT, web / FLOAT)
        names = sorted(p.name for p in (web / FLOAT).iterdir())
        models["float"] = ([f"{FOLDER}/{FLOAT}/{n}" for n in names], "export")
    contract = contracts.read(part.source / "contract.json")
    tokenizer = f"tokenizer/{contract.text.file}"
    read = [tokenizer, f"{FOLDER}/onnxruntime-web/ort-wasm-simd-threaded.wasm"]
    read += [name for names, _ in models.values() for name in names]
    encoder = tasks.look_up(contract).inputs.open(part.bundle / "tokenizer", contract)
    cut = " ".join([TEXTS[0]] * (contract.text.max_length // WORDS + 1))
    document = {
        "version": 1,
        "name": part.name,
        "contract": contract.to_json(),
        "output": tasks.look_up(contract).output,
        "threads": part.entry["threads"],
        "characters": web_characters.build_table(encoder),
        "check": [
            {"text": t, "ids": encode(contract, encoder, [t]).encodings[0].ids}
            for t in (*TEXTS, cut)
        ],
        "models": {
            name: {
                "model": files[0],
                "external": files[1:],
                "limit": limit_of(part.report, hop, tasks.look_up(contract).output),
                **_run_texts(part.bundle / files[0], contract, encoder),
            }
            for name, (files, hop) in models.items()
        },
        "files": {n: _entry(part.bundle / n) for n in sorted(read)},
    }
    text = json.dumps(document, indent=1, allow_nan=False)
    (web / "bundle.json").write_text(text, encoding="utf-8")


def limit_of(report: Mapping[str, Any], hop: str, output: str) -> float:
    """Return the limit, for a bundle's web page, of the difference of one output between the
    browser and the harness.

    hop: name of the ledger's comparison whose limit is used

    Raises OptimizeError if this hop of the report has no limit for the output.
    """
    for entry in report["ledger"]:
        outputs = (entry.get("spread") or {}).get("outputs") or {}
        if entry["hop"] == hop and (limit := (outputs.get(output) or {}).get("limit")):
            return float(limit)
    raise OptimizeError(
        f"hop {hop} of the ledger has no measured limit of {output}, which the page needs to judge "
        "its outputs",
        where="package: web/bundle.json",
        fix="Add texts to validate.data, and see the ledger in report.html.",
    )


def _run_texts(model: Path, contract: Contract, encoder: Any) -> dict[str, list[Any]]:
    """Return {"outputs", "answers"} for TEXTS from the bundle's harness, with which the web page
    compares its own, then None for the cut text."""
    outputs: list[Any] = []
    expected: list[Any] = []
    with closing(OrtRunner(model, threads=1)) as runner:
        for text in TEXTS:
            batch = encode(contract, encoder, [text])
            result = runner.infer(batch)
            output = np.ascontiguousarray(result[tasks.look_up(contract).output], "<f4")
            numbers = base64.b64encode(output.tobytes()).decode("ascii")
            outputs.append({"dims": list(output.shape), "data": numbers})
            expected += build_answers(contract, decode(contract, result, batch), batch)
    return {"outputs": [*outputs, None], "answers": [*expected, None]}


def _entry(path: Path) -> Mapping[str, Any]:
    return {"sha256": digest_file(path), "size": path.stat().st_size}
