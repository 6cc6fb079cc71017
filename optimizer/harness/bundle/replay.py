"""Answer judged rows again, to compare a bundle bit for bit with the engine that was judged.

    rows      [{"input": text, {"base64": bytes of an image file} or {"arrays": {name: nested
              list}}, "pair": text or null}]
    answers   one JSON value per row: the task's answer, all rows in one batch; for text-generation
              {"tokens", "text", "scores": sha256 of the first token's scores} of greedy decoding,
              each row by itself

The evaluator calls `replay_answers` for the engine that it judged, and writes {"rows", "answers"}
as JSON; `main` does the same in a new process with a bundle.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import tasks
from ..contract import Contract
from ..generate import Options, generate
from ..generate.loop import prefill
from ..runtimes.runner import Runner
from ..tasks import text_generation
from ..tasks.answering import Predictor, Query, answer

PROMPT, NEW = 16, 12
"""Tokens of a prompt, and new tokens, where the context has room."""


def replay_answers(
    contract: Contract, encoder: Any, runner: Runner, rows: Sequence[Mapping[str, Any]]
) -> list[Any]:
    """Answer the rows that validate judged, in order, as one JSON value per row, to compare a
    bundle with the engine that was judged.

    encoder: tokenizer or image encoder of the bundle

    Raises HarnessError for a row that cannot be answered.
    """
    if tasks.look_up(contract).generates:
        return [_continued(contract, encoder, runner, row["input"]) for row in rows]
    queries = [Query(f"row {i}", _input(r["input"]), r["pair"]) for i, r in enumerate(rows)]
    results = []
    for answered in answer(Predictor(contract, encoder, runner.infer), queries, len(rows)):
        if answered.error is not None:
            raise answered.error
        results.append(dict(answered.answer or {}))
    return results


def main(bundle: Path, target: str, file: Path) -> None:
    """Print the answers of a bundle's engine to the rows in a JSON file.

    target: target of the engine

    Raises HarnessError for a row that cannot be answered.
    """
    from .bundle import Bundle

    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    with Bundle(bundle, target=target) as opened:
        print(json.dumps(replay_answers(opened.contract, opened.encoder, opened.runner, rows)))


def _input(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return value["arrays"] if "arrays" in value else base64.b64decode(value["base64"])


def _continued(contract: Contract, tokenizer: Any, runner: Runner, text: str) -> dict[str, Any]:
    new = min(NEW, contract.decoder.context // 2)
    ids = tokenizer.encode(text).ids[: min(PROMPT, contract.decoder.context // 2)]
    first = runner.decoder(contract, len(ids) + new)
    scores = prefill(first, text_generation.arrays(contract, [ids]))
    options = Options(max_new_tokens=new, do_sample=False, ignore_eos=True)
    (completion,) = generate(contract, runner, tokenizer, [ids], options)
    bits = np.ascontiguousarray(scores, "<f4").tobytes()
    return {
        "tokens": list(completion.tokens),
        "text": completion.text,
        "scores": hashlib.sha256(bits).hexdigest(),
    }
