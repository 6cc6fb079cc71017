"""Count the tokens of the recipe's data independently of the code that reads them for calibration
or evaluation: with the tokenizers library on the checkpoint's tokenizer file, text by text.

A digest is the sha256 of the sorted sha256 of each row's or window's token ids, int64 in this
machine's byte order, so it does not depend on how rows are batched.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.data import conversations
from optimizer.data.datasets import read_calibration_rows, read_samples
from optimizer.data.sample import Sample
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import PIECE, TEXT, TextTokenizer
from optimizer.harness.tasks import fill_mask
from optimizer.recipe.schema import Validation
from optimizer.recipe.stage_sections import reads_activations

CONSUMED = "calibration.json"
"""File in the compress stage's folder, see compress/walk/consumed.py."""


@dataclass(frozen=True)
class Counts:
    """Counts of a data set's rows and tokens, made again independently to judge those of
    calibration and evaluation.

    rows: number of texts, images or windows
    tokens, digest: tokens of texts or windows; None for images
    """

    rows: int
    tokens: int | None = None
    digest: str | None = None

    def __str__(self) -> str:
        if self.tokens is None:
            return f"{self.rows:,} rows"
        return f"{self.rows:,} rows of {self.tokens:,} tokens (sha256 {str(self.digest)[:12]})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def count_calibration(section: Validation, source: Path, contract: Contract) -> Counts | None:
    """Count the calibration data that compress must read; None where the recipe reads none.

    source: folder of load, or of the step that made the checkpoint
    """
    settings = section.calibrate
    if settings is None or not reads_activations(section.quantize, section.sparsity):
        return None
    if section.quantize.of_kind("pass-through"):
        return None
    task, checkpoint = tasks.look_up(contract), source / "checkpoint"
    rows = read_calibration_rows(settings, task)
    tuning = section.quantize.model_tuning
    held_out = tuning.held_out if tuning else 0
    if task.calibration_items == "windows":
        windows = _windows(rows, checkpoint, contract, settings.sequence_length)
        return _counts(windows[: settings.samples - held_out])
    count = min(settings.samples, len(read_samples(settings.data)))
    if task.inputs.name != TEXT.name:
        return Counts(count)
    tokenizer = _tokenizer(checkpoint, contract)
    limit = min(settings.sequence_length, contract.text.max_length)
    if contract.template is not None:
        return _counts(
            [fill_template(tokenizer, contract.template, r, limit) for r in rows[:count]]
        )
    cut = "only_first" if task.chooses else "only_second" if task.extracts else "longest_first"
    tokenizer.enable_truncation(limit, strategy=cut)
    spec = contract.text
    if spec.padded_to is not None:  # read as tokens
        tokenizer.enable_padding(
            pad_id=spec.pad_id, pad_token=spec.pad_token, length=spec.padded_to
        )
    if task.chooses:
        rows = [replace(row, text_pair=_hypothesis(row.text, contract)) for row in rows]
    before = contract.vectors.text  # the prompt of a sentence embedding
    encodings = [tokenizer.encode(before + row.text, row.text_pair) for row in rows[:count]]
    ids = [np.array(encoding.ids, np.int64) for encoding in encodings]
    if task.fills:
        for row, encoding in zip(ids, encodings, strict=True):
            row[fill_mask.draw_positions(encoding)] = contract.text.mask
    return _counts(ids)


def fill_template(tokenizer: Any, template: Sequence[str], row: Sample, limit: int) -> Any:
    """Return the token ids that a query and its document should have in a template. Where the text
    is cut, the tokens behind the document stay.

    template: texts before, between and behind query and document
    limit: maximum number of tokens
    """
    pair = ("", row.text) if row.text_pair is None else (row.text, row.text_pair)
    whole, *others = (
        tokenizer.encode(template[0] + q + template[1] + d + template[2], add_special_tokens=False)
        for q, d in (pair, ("0", "0"), ("1 2 3 4", "1 2 3 4"))
    )
    backwards = zip(*(reversed(encoding.ids) for encoding in others), strict=False)
    tail = [a for a, b in takewhile(lambda both: both[0] == both[1], backwards)][:limit][::-1]
    cut = len(whole.ids) > limit
    ids = [*whole.ids[: limit - len(tail)], *tail] if cut else whole.ids
    return np.array(ids, np.int64)


def _hypothesis(text: str, contract: Contract) -> str:
    """Return the hypothesis that calibration should read with a text: that of a label chosen by the
    text's characters."""
    labels = contract.choice.candidate_labels
    label = labels[zlib.crc32(text.encode()) % len(labels)]
    return contract.choice.hypothesis_template.format(label)


def read_consumed(state: Path) -> Counts | None:
    """Read the counts that compress wrote; None where it wrote none.

    state: folder of compress
    """
    file = state / CONSUMED
    return Counts(**json.loads(file.read_text("utf-8"))) if file.is_file() else None


def count_predicted(
    rows: Sequence[Sample], checkpoint: Path, contract: Contract, length: int
) -> Counts:
    """Count the tokens that a perplexity predicts: in each window all but the first.

    rows: held-out texts
    length: tokens of a window
    """
    return _counts([ids[1:] for ids in _windows(rows, checkpoint, contract, length)])


def _windows(
    rows: Sequence[Sample], checkpoint: Path, contract: Contract, sequence_length: int
) -> list[Any]:
    """Cut texts, joined by the end token, or conversations into windows of token ids
    (sequence_length,), independently of data/. Tokens that fill no window are left out."""
    tokenizer = _tokenizer(checkpoint, contract)
    stream: list[int] = []
    for row in conversations.render(rows, contract, tokenizer):
        if stream and row.messages is None:
            stream.append(contract.decoder.eos_ids[0])
        stream.extend(_ids(tokenizer, row.text))
    whole = len(stream) // sequence_length
    return list(
        np.array(stream[: whole * sequence_length], np.int64).reshape(whole, sequence_length)
    )


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Compute, to count independently, the token ids of a text. A long text is read in pieces by
    inputs/text.py, because the ids depend on where a piece ends."""
    if len(text) > PIECE:
        return TextTokenizer(tokenizer).ids([text])[0]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _tokenizer(checkpoint: Path, contract: Contract) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint / contract.text.file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _counts(rows: Sequence[Any]) -> Counts:
    whole = hashlib.sha256()
    for digest in sorted(hashlib.sha256(row.tobytes()).digest() for row in rows):
        whole.update(digest)
    return Counts(len(rows), sum(len(row) for row in rows), whole.hexdigest())
