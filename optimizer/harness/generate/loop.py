"""Generation loop: prefill, then one token per row and decode step, with an explicit KV cache.

Laws (tested): the prompts of a batch change each other's logits by float rounding only, and never
the random numbers of a row; prefill in pieces gives the result of prefill at once; the pieces of
`stream` joined are the texts of `generate`.
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
from ..tasks.text_generation import Prompt, arrays, build_step_arrays, tokenize_prompt
from .options import Options
from .prompt_lookup import PromptLookup, generate_row
from .row import Piece, RowState, Rules

BATCH = 8  # prompts per batch
PREFILL = 512  # tokens of one prompt per run, which bounds the logits to (1, 512, vocabulary)
LOGITS = 1 << 30  # maximum bytes of logits in the prefill of several prompts


@dataclass(frozen=True)
class Completion:
    """Generated text of one prompt.

    text: text without special tokens, up to a stop string.
    tokens: ids of all generated tokens, the last token included.
    finish: "eos" (end of text), "stop" (the stop string in `stop`) or "length" (max_new_tokens, or
        the context is full).
    prompt_tokens: number of tokens of the prompt.
    """

    text: str
    tokens: tuple[int, ...]
    finish: str
    prompt_tokens: int
    stop: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return a dict of a generated text's fields; "tokens" is the number of generated
        tokens."""
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
    """Generate the text of each prompt, in order; see `stream` for the parameters and errors."""
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
    """Yield pieces of text as they are generated: per step one piece of each unfinished row.

    prompts: a text, a conversation or token ids each; see text_generation.prompt_ids. All are
        checked before the first step.
    batch_size: prompts per batch.
    numbers: number of each prompt, 0, 1, ... by default. The random numbers of a row follow from
        this number and the seed.
    lookup: prompt lookup (prompt_lookup.py), which runs one prompt at a time; None: no lookup.
    Raises InputError without prompts, or naming the prompt that prompt_ids refuses.
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
            "a single prompt was given", where="prompts", fix="Put it in a list of prompts."
        )
    return [tokenize_prompt(contract, tokenizer, p, f"prompts[{i}]") for i, p in enumerate(prompts)]


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
    """Yield the pieces of generated text of checked prompts, in batches or, with `lookup`, one
    prompt at a time."""
    rules = Rules.build(contract, tokenizer, options)
    drawn = range(len(prompts)) if numbers is None else numbers
    if lookup is not None:
        for i, prompt in enumerate(prompts):
            row = RowState.start(rules, prompt, i, drawn[i])
            yield from generate_row(lookup, row, prompt, PREFILL)
        return
    for group in batches(contract, [len(p) for p in prompts], options, batch_size):
        rows = [RowState.start(rules, prompts[i], i, drawn[i]) for i in group]
        yield from _batch(contract, runner, [prompts[i] for i in group], rows)


def batches(
    contract: Contract, lengths: Sequence[int], options: Options, batch_size: int
) -> Iterator[range]:
    """Divide the prompts of a generation into batches: yield ranges of prompt numbers; the prompts
    of a range run as one batch.

    lengths: tokens of each prompt.
    batch_size: maximum prompts per batch.
    The padded batch must fit the context, because some models use columns as positions, and its
    logits must fit LOGITS, because some attention operators cannot prefill a batch in pieces. A
    prompt that does not fit with another runs alone.
    """
    room = contract.decoder.context - options.max_new_tokens
    tokens = LOGITS // (4 * contract.decoder.vocabulary)
    start = 0
    while start < len(lengths):
        stop = start + 1
        while stop < min(start + batch_size, len(lengths)):
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
    rows: list[RowState],
) -> Iterator[Piece]:
    """Generate the texts of one batch until all have ended; yield a piece per row and step.

    prompts: token ids of each row
    """
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
        mask = np.concatenate([mask, np.ones_like(chosen)], 1)  # a finished row is fed padding
        scores = decoder.last(build_step_arrays(contract, chosen, mask))


def prefill(decoder: Decoder, first: Mapping[str, Array], size: int = PREFILL) -> Array:
    """Run the prompts through the decoder; return the scores (batch, vocabulary) of the next token.

    first: input arrays of all prompts (text_generation.arrays).
    size: maximum tokens per run.
    """
    scores: Array | None = None
    for piece in pieces(first, size):
        scores = decoder.last(piece)
    assert scores is not None
    return scores
