"""Choose the held-out inputs that the ledger runs, and put them into batches.

    select_inputs    rows of validate.data -> up to LEDGER_TEXTS inputs of all sizes
    make_usual_batches     those inputs -> batches of one to eight rows, on which every hop runs
    make_extreme_batches   those inputs -> a batch of many unequal rows and the longest text, which
                           graphs and the harness run end to end only, never in pieces
    list_untested          batches -> the lengths and sizes that no hop runs, for the report

Called by materials.py; `plan` calls select_inputs. The batches of a decoder are made in
decoder_batches.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample, pick_input
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.inputs.text import TEXT
from optimizer.harness.tasks import Task
from optimizer.recipe.targets import TargetSection
from optimizer.validate.ledger import decoder_batches

LEDGER_TEXTS = 32
LONGEST = 128  # tokens of a usual input: all its activations are in memory at once
LONGEST_EXTREME = 512  # tokens: correct runs are made of it, and attention grows with its square
ROWS = 32  # of the extreme batch
WIDTHS = range(4, 17)  # tokens of the rows of the extreme batch, one length after the other


def select_inputs(rows: Sequence[Sample], task: Task | None = None) -> list[Any]:
    """Select for the ledger up to LEDGER_TEXTS inputs from the evaluation rows, evenly by size.

    task: task whose inputs they are; None: one that reads single texts

    Raises DataError for fewer than three inputs.
    """
    kind = TEXT if task is None else task.inputs
    each = (row.input if task is None else pick_input(row, task) for row in rows)
    texts = sorted(dict.fromkeys(each), key=kind.extent)
    if len(texts) < 3:
        raise DataError(
            f"{len(texts)} different {kind.name}s",
            where="validate.data",
            accepted="three or more, so that padding and batches can be compared",
        )
    at = np.unique(np.linspace(0, len(texts) - 1, LEDGER_TEXTS).round().astype(int))
    return [texts[i] for i in at]


def make_usual_batches(
    texts: Sequence[Any], contract: Contract, encoder: Any, bytes_per_token: float
) -> list[Batch]:
    """Make the batches that every hop runs: [the input of middle size alone; the smallest and the
    largest together; all in groups of eight; three, padded further]. Of inputs of one size: [one
    alone; eight; all].

    texts: result of select_inputs
    encoder: the harness's tokenizer or image reader
    bytes_per_token: size of one token in a model's trace, which bounds a decoder's batches
    """
    if tasks.look_up(contract).generates:
        return decoder_batches.make(texts, contract, encoder, bytes_per_token)
    kind = tasks.look_up(contract).inputs
    texts = sorted(dict.fromkeys(texts), key=kind.extent)
    longest = min(LONGEST, tasks.longest(contract))

    def encode(group: Sequence[Any], length: int | None = None) -> Batch:
        batch = tasks.encode(contract, encoder, group, None, length)
        if kind.size and batch.real.shape[1] > longest:
            batch = tasks.encode(contract, encoder, group, None, longest)
        return batch

    middle = texts[len(texts) // 2]
    if not kind.size:
        return [encode([middle]), encode(texts[:8]), encode(texts)]
    groups = [encode([middle]), encode([texts[0], texts[-1]])]
    groups += [encode(texts[i : i + 8]) for i in range(0, len(texts), 8)]
    width = groups[1].real.shape[1]
    groups.append(encode(texts[:3], length=min(longest, width + 7)))
    return groups


@dataclass(frozen=True)
class ExtremeSizes:
    """Sizes of the ledger's extreme batches.

    tokens: length of the longest text
    rows: rows of the batch of many rows
    """

    tokens: int = LONGEST_EXTREME  # length of the longest text
    rows: int = ROWS  # size of the largest batch

    @classmethod
    def of(cls, target: TargetSection) -> ExtremeSizes:
        """The largest length and batch of the target's profiles, at most the defaults."""
        profiles = target.profiles
        return cls(
            min(LONGEST_EXTREME, max((p.sequence[2] for p in profiles), default=LONGEST_EXTREME)),
            min(ROWS, max((p.batch[2] for p in profiles), default=ROWS)),
        )


def make_extreme_batches(
    texts: Sequence[Any],
    contract: Contract,
    encoder: Any,
    bytes_per_token: float,
    sizes: ExtremeSizes,
) -> list[Batch]:
    """Make [the batch of many rows, the batch of the longest text]; [] for inputs of one size.

    texts: result of select_inputs
    encoder: the harness's tokenizer or image reader
    bytes_per_token: size of one token in a model's trace, which bounds a decoder's longest text
    sizes: numbers of tokens and rows
    """
    if tasks.look_up(contract).generates:
        longest = min(sizes.tokens, decoder_batches.count_longest(bytes_per_token))
        return decoder_batches.make_extremes(texts, contract, encoder, longest, sizes.rows)
    kind = tasks.look_up(contract).inputs
    if not kind.size:
        return []
    most = min(sizes.tokens, tasks.longest(contract))
    ends = [min(WIDTHS[i % len(WIDTHS)], most) for i in range(sizes.rows)]
    rows = [_truncate(contract, encoder, t, n) for t, n in zip(cycle(texts), ends, strict=False)]
    many = [row for row in kind.encode(contract, encoder, rows) if not row.problem]
    longest_text = kind.encode(contract, encoder, [make_overlong(contract, texts)], None, most)
    return [kind.collate(contract, many), kind.collate(contract, longest_text)]


def make_overlong(contract: Contract, texts: Sequence[Any]) -> Any:
    """Join `texts` to one input of the ledger of more tokens than the model accepts, or than
    LONGEST_EXTREME if that is less."""
    words = min(LONGEST_EXTREME, tasks.longest(contract)) + 1  # each of which is a token or more
    return tasks.look_up(contract).inputs.lengthen(cycle(texts), words)


def _truncate(contract: Contract, encoder: Any, text: str, tokens: int) -> str:
    """Cut a text of the ledger so that it has `tokens` tokens, special tokens included."""
    (encoded,) = tasks.look_up(contract).inputs.encode(contract, encoder, [text], None, tokens)
    if encoded.problem:  # `tokens` leaves room for special tokens only
        return text
    return text[: max(end for _, end in encoded.encoding.offsets)] or text


def list_untested(batches: Sequence[Batch], extremes: Sequence[Batch], contract: Contract) -> str:
    """Write a sentence on the lengths and batch sizes that no hop runs, in the units of the task's
    inputs."""
    task, parts = tasks.look_up(contract), []
    kind = task.inputs
    if kind.size:
        limit = contract.decoder.context if task.generates else tasks.longest(contract)
        usual = max(int(b.real.sum(1).max()) for b in batches)
        longest = max([usual, *(int(b.real.sum(1).max()) for b in extremes)])
        if longest > usual + 1:
            parts.append(f"{kind.name}s of {usual + 1} to {longest - 1} {kind.size}")
        if limit > longest:
            parts.append(f"{kind.name}s of {longest + 1} to {limit} {kind.size}")
    rows = max(b.rows for b in (*batches, *extremes))
    parts.append(f"batches of more than {rows} {kind.name}s")
    return f"not tested: {'; '.join(parts)}"
