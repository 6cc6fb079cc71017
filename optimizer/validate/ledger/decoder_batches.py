"""Make a decoder's batches: short pieces of held-out text, padded on the left.

    make             texts -> usual batches
    make_extremes    texts -> [batch of many unequal rows, batch of the longest text]
    count_positions, count_extreme_positions    -> their sizes in tokens, for the memory estimate
                                                   of `plan`

Called by inputs.py and estimate.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.tasks import text_generation
from optimizer.validate import decoder
from optimizer.validate.ledger.distance import Array

WIDTHS = (64, 9, 33, 2, 48, 17, 5, 24)  # tokens of one text after the other
MANY = range(2, 9)  # tokens of the rows of the first extreme batch
FEWEST, MOST = 64, 512  # tokens of all batches together
MEMORY = 256 << 20  # bytes of one model's activations in memory at once
PADDED_BY = 7  # columns of padding that the last usual batch adds


def count_positions(bytes_per_token: float) -> tuple[int, int]:
    """Return (tokens of the sampled batches, tokens of all usual batches), padding included, if
    every text is long enough for its row. Materials.sampled chooses the sample.

    bytes_per_token: size of one token in a model's trace
    """
    widths: list[int] = []
    while sum(widths) < (tokens := _tokens(bytes_per_token)):
        widths.append(_width(len(widths), tokens))
    longest, three = max(widths), len(widths[:2]) + 1
    eights = [widths[i : i + 8] for i in range(0, len(widths), 8)]
    sizes = [longest, three * longest, *(len(group) * max(group) for group in eights)]
    sizes.append(three * (longest + PADDED_BY))
    return sum(sizes[i] for i in {0, 1, len(sizes) // 2}), sum(sizes)


def make(
    texts: Sequence[str], contract: Contract, tokenizer: Any, bytes_per_token: float
) -> list[Batch]:
    """Make the ledger's usual batches, with the contract's inputs and an empty KV cache: [the
    longest text alone; the two shortest and the longest; all in groups of eight; the batch of
    three, padded further].

    texts: held-out texts, of which the beginnings are used
    tokenizer: the harness's tokenizer
    bytes_per_token: size of one token in a model's trace; it bounds the number of tokens
    """
    rows = _rows(texts, contract, tokenizer, _tokens(bytes_per_token))
    longest = max(rows, key=len)
    three = [*sorted(rows, key=len)[:2], longest]
    groups = [[longest], three, *(rows[i : i + 8] for i in range(0, len(rows), 8))]
    batches = [_batch(group, contract) for group in groups]
    batches.append(_batch(three, contract, len(longest) + PADDED_BY))
    return batches


def make_extremes(
    texts: Sequence[str], contract: Contract, tokenizer: Any, longest: int, rows: int
) -> list[Batch]:
    """Make the ledger's extremes: [a batch of `rows` beginnings of texts, 2 to 8 tokens each; a
    batch of one text, all `texts` joined].

    tokenizer: the harness's tokenizer
    longest: tokens of the joined text, at most the length that the model accepts
    rows: number of rows of the first batch
    """
    ids = [i for text in texts for i in tokenizer.encode(text).ids]
    width = min(contract.text.max_length, contract.decoder.context, longest)
    begun = cycle(np.array(tokenizer.encode(text).ids, np.int64) for text in texts)
    many = [next(begun)[: MANY[i % len(MANY)]] for i in range(rows)]
    long = np.resize(ids, width)
    return [_batch([r for r in many if len(r)], contract), _batch([long], contract)]


def count_longest(bytes_per_token: float) -> int:
    """Count the tokens of the longest text of make_extremes, before the model's context limits it.

    bytes_per_token: size of one token in a model's trace
    """
    return int(_tokens(bytes_per_token))


def count_extreme_positions(bytes_per_token: float, rows: int) -> tuple[int, int]:
    """Return (tokens of the longest text, tokens of the batch of many rows) of make_extremes,
    padding included.

    bytes_per_token: size of one token in a model's trace
    rows: number of rows of the second
    """
    return count_longest(bytes_per_token), rows * max(MANY)


def _tokens(bytes_per_token: float) -> float:
    """Choose the number of tokens of all usual texts of the ledger together: the traces must fit
    into MEMORY; at least FEWEST, at most MOST."""
    return min(MOST, max(FEWEST, MEMORY / max(bytes_per_token, 1)))


def _width(row: int, tokens: float) -> int:
    """Number of tokens of the ledger's text number `row`: one of WIDTHS in turn. Where `tokens`,
    the number for all texts, is small, the widths are smaller, so that a large model runs on
    several lengths too."""
    share = min(1.0, tokens / sum(WIDTHS))
    return max(2, round(share * WIDTHS[row % len(WIDTHS)]))


def _rows(texts: Sequence[str], contract: Contract, tokenizer: Any, tokens: float) -> list[Array]:
    """Take the beginnings of held-out texts as the ledger's rows of token ids (length,), about
    `tokens` tokens in all."""
    longest = min(contract.text.max_length, contract.decoder.context) - PADDED_BY
    rows: list[Array] = []
    for text in texts:
        width = min(_width(len(rows), tokens), longest)
        ids = tokenizer.encode(text).ids[:width]
        if len(ids) >= min(2, width):
            rows.append(np.array(ids, np.int64))
        if sum(map(len, rows)) >= tokens:
            break
    return rows


def _batch(rows: Sequence[Array], contract: Contract, width: int = 0) -> Batch:
    inputs = text_generation.arrays(contract, rows, width)
    cache = decoder.empty_cache(contract.decoder, len(rows))
    return Batch({**inputs, **cache}, (), (), inputs.real)
