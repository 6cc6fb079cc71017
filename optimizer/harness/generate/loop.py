"""The generation loop: prefill, then one token per row and step, with an explicit cache.

Laws (tested): which prompts share a batch changes logits by float rounding only, and never the
random numbers of a row; the prompt in pieces gives what it gives in one; the pieces of `stream`
put together are the texts of `generate`, which is built on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..contract import Contract
from ..errors import InputError
from ..inputs.batch import Array
from ..runtimes.decoder import Decoder, DecoderRunner, pieces
from ..tasks.text_generation import Prompt, arrays, next_arrays, prompt_ids
from .options import Options
from .prompt_lookup import PromptLookup, continued
from .row import Piece, Row, Rules

BATCH = 8  # prompts that run together
PREFILL = 512  # tokens of one prompt per run: bounds the logits, (1, 512, vocabulary) floats
LOGITS = 1 << 30  # bytes of logits that several prompts may take when they run at once


@dataclass(frozen=True)
class Completion:
    """What followed one prompt.

    text: without special tokens, ending before a stop string. tokens: every id drawn, the one that
    ended it included. finish: "eos" (the model ended it), "stop" (a stop string, named in `stop`),
    or "length" (max_new_tokens, or the end of the context). prompt_tokens: how many it followed.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    stop: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As plain data, `tokens` as their number."""
        return {**asdict(self), "tokens": len(self.tokens)}


def generate(
    contract: Contract,
    runner: DecoderRunner,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: Options | None = None,
    *,
    batch_size: int = BATCH,
    numbers: Sequence[int] | None = None,
    lookup: PromptLookup | None = None,
) -> list[Completion]:
    """What follows each prompt, in order. Takes and raises what `stream` does."""
    rows = _prompts(contract, tokenizer, prompts, batch_size)
    texts = [""] * len(rows)
    tokens: list[list[int]] = [[] for _ in rows]
    ends: dict[int, Piece] = {}
    chosen = options or Options()
    for piece in _stream(contract, runner, tokenizer, rows, chosen, batch_size, numbers, lookup):
        texts[piece.row] += piece.text
        tokens[piece.row].append(piece.token)
        if piece.finish is not None:
            ends[piece.row] = piece
    return [
        Completion(texts[i], tuple(tokens[i]), str(ends[i].finish), len(rows[i]), ends[i].stop)
        for i in range(len(rows))
    ]


def stream(
    contract: Contract,
    runner: DecoderRunner,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    options: Options | None = None,
    *,
    batch_size: int = BATCH,
    numbers: Sequence[int] | None = None,
    lookup: PromptLookup | None = None,
) -> Iterator[Piece]:
    """Pieces as they are made: per step one of each row that is not finished, in order of rows.

    prompts: a text, a conversation or token ids each; see text_generation.prompt_ids. They run
    batch_size at a time. The prompts are looked at when this is called, so that nothing starts
    which cannot be answered. numbers: of each prompt among all that are asked for (0, 1, ...
    where not given): its random numbers follow from this and the seed. lookup: guess tokens (see
    prompt_lookup.py), one prompt at a time; its slots are `runner`'s.
    Raises InputError: no prompts, or one that prompt_ids refuses, by its number.
    """
    rows = _prompts(contract, tokenizer, prompts, batch_size)
    chosen = options or Options()
    return _stream(contract, runner, tokenizer, rows, chosen, batch_size, numbers, lookup)


def _prompts(
    contract: Contract, tokenizer: Any, prompts: Sequence[Prompt], batch_size: int
) -> list[list[int]]:
    if isinstance(prompts, str) or not len(prompts):
        raise InputError("a list of at least one prompt is needed", where="prompts")
    if batch_size < 1:
        raise InputError(f"{batch_size} was given", where="batch_size", accepted="1 or more")
    if isinstance(prompts[0], Mapping | int):
        raise InputError(
            "a single conversation was found", where="prompts", fix="Put it in a list of prompts."
        )
    return [prompt_ids(contract, tokenizer, p, f"prompts[{i}]") for i, p in enumerate(prompts)]


def _stream(
    contract: Contract,
    runner: DecoderRunner,
    tokenizer: Any,
    prompts: list[list[int]],
    options: Options,
    batch_size: int,
    numbers: Sequence[int] | None,
    lookup: PromptLookup | None,
) -> Iterator[Piece]:
    rules = Rules.of(contract, tokenizer, options)
    drawn = range(len(prompts)) if numbers is None else numbers
    if lookup is not None:
        for i, prompt in enumerate(prompts):
            row = Row.begun(rules, prompt, i, drawn[i])
            yield from continued(lookup, row, prompt, PREFILL)
        return
    for group in batches(contract, [len(p) for p in prompts], options, batch_size):
        rows = [Row.begun(rules, prompts[i], i, drawn[i]) for i in group]
        yield from _batch(contract, runner, [prompts[i] for i in group], rows)


def batches(
    contract: Contract, lengths: Sequence[int], options: Options, size: int
) -> Iterator[range]:
    """Which prompts of `lengths` tokens run together: neighbours, at most `size`, such that no
    column lies beyond the context and their logits take at most LOGITS. Any other runs alone.

    There are models that take a position for a column, and attentions that a batch cannot fill in
    pieces, only a single row.
    """
    room = contract.decoder.context - options.max_new_tokens
    tokens = LOGITS // (4 * contract.decoder.vocabulary)
    start = 0
    while start < len(lengths):
        stop = start + 1
        while stop < min(start + size, len(lengths)):
            width = max(lengths[start : stop + 1])
            if width > room or width * (stop + 1 - start) > tokens:
                break
            stop += 1
        yield range(start, stop)
        start = stop


def _batch(
    contract: Contract,
    runner: DecoderRunner,
    prompts: list[list[int]],
    rows: list[Row],
) -> Iterator[Piece]:
    width = max(map(len, prompts))
    decoder = runner.decoder(contract, width + max(r.room for r in rows))
    first = arrays(contract, prompts)
    mask = np.asarray(first["attention_mask"], np.int64)
    scores = prefill(decoder, first, PREFILL if len(rows) == 1 else width)
    pad = contract.text.pad_id
    while True:
        chosen = np.full((len(rows), 1), pad, np.int64)
        for i, row in enumerate(rows):
            if row.finish is None:
                piece = row.add(scores[i])
                chosen[i] = piece.token
                yield piece
        if all(row.finish is not None for row in rows):
            return
        mask = np.concatenate([mask, np.ones_like(chosen)], 1)  # a finished row reads padding
        scores = decoder.step(next_arrays(contract, chosen, mask))[:, -1]


def prefill(decoder: Decoder, first: Mapping[str, Array], size: int = PREFILL) -> Array:
    """Scores (batch, vocabulary) of what follows the prompts, run `size` tokens at a time."""
    scores: Array | None = None
    for piece in pieces(first, size):
        scores = decoder.step(piece)[:, -1]
    assert scores is not None
    return scores
