"""The hop `cache`: check that a decoder continues from its KV cache as from the complete text.

compared   logits of the lowered model, through the harness's own decoder, for the same tokens in
           two ways
limit      the distance of correct runs, token by token (CorrectRuns.token_logits); laws 4 and 5:
           equal bits
caught     a KV cache that misses a step, is shared by two texts or rounded to eight bits:
           test_a_fault_of_the_kv_cache_is_caught_at_the_cache,
           test_a_cache_shared_by_two_texts_is_caught

 1. pieces    a text in one piece = in pieces = token by token
 2. padding   rows padded on the left = each row alone, at once and continued token by token
 3. batch     rows of one length together = each row alone, at once and continued token by token
 4. turns     two texts continued in turns = each text by itself
 5. inputs    a step leaves its input KV cache unchanged, and gives the same bits again
 6. arrivals  texts that begin and end at any time, as in a server = each text alone
 7. newest    the newest token's logits computed by themselves = with those of all tokens

The operators are the same in all. The number of rows and tokens of a product differs, and with it
the order of its sums; where inputs are quantized (by the graph, or inside a kernel such as
MatMulNBits), values near a tie may get other integers. Where inputs stay float, the graph is also
run as written, where correct runs lie much closer. Each step then de-quantizes all weights, so a
large model (depth.py) is run as written without the laws of MANY_STEPS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing

import numpy as np

from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks import text_generation
from optimizer.validate import target_runner
from optimizer.validate.decoder import OnnxDecoder
from optimizer.validate.ledger.breach import CORRECT_RUNS, write_breach
from optimizer.validate.ledger.distance import Array, Distance, measure_distance, merge
from optimizer.validate.ledger.entry import MEASURED, LedgerEntry
from optimizer.validate.ledger.limits.spread import Spread
from optimizer.validate.materials import Materials

PIECE = 5  # tokens at a time, where a text is given in pieces
TAIL = 6  # tokens given one by one after a batch
PLACES = 3  # texts at once
Pairs = list[tuple[Array, Array]]  # logits of the same tokens, computed in two ways


def cache(m: Materials) -> LedgerEntry:
    """Hop `cache`: check on pieces of held-out text that a decoder gives the same logits with a KV
    cache as without (laws 1 to 7)."""
    precision = m.section.target.computes_in
    fused = m.correct.token_logits(precision, blocks=bool(m.kernel_blocks))
    measured, problems = _laws(m, LAWS, fused.limits["logits"], fuse=True)
    if problems or not m.kernel_blocks:
        return _entry(fused, measured, problems)
    written = m.correct.token_logits(m.precision, blocks=False)
    if m.depth == "full":
        return _entry(written, *_laws(m, LAWS, written.limits["logits"], fuse=False))
    laws = {name: law for name, law in LAWS.items() if name not in MANY_STEPS}
    entry = _entry(written, *_laws(m, laws, written.limits["logits"], fuse=False))
    left = "; ".join(MANY_STEPS)
    return entry.with_unproven(
        f"validate.ledger is {m.depth}: judged with the limit of fused kernels only: {left}"
    )


def _entry(spread: Spread, measured: Distance, problems: list[str]) -> LedgerEntry:
    limit = spread.limits["logits"]
    report = spread.as_dict({"logits": measured.worst})
    return LedgerEntry(
        "cache", "itself", limit, measured, not problems, MEASURED, tuple(problems), spread=report
    )


def _laws(
    m: Materials, laws: Mapping[str, Law], limit: float, *, fuse: bool
) -> tuple[Distance, list[str]]:
    """Run the laws and return (largest distance of a token's logits computed in two ways,
    problems).

    laws: those of LAWS to compare
    limit: largest accepted distance
    fuse: True for fused kernels, as served; False for operators as written
    """
    problems, each = [], []
    with closing(target_runner.open_decoder(m, fuse=fuse)) as runner:
        served = ServedDecoder(m, runner)
        for law, compare in laws.items():
            pairs = [pair for rows in compare(served) for pair in zip(*rows, strict=True)]
            each.append(measure_distance(pairs))
            if not each[-1].worst <= limit:
                shown = write_breach(each[-1].worst, limit)
                problems.append(f"{law}: a token is {shown[0]} apart, {shown[1]} {CORRECT_RUNS}")
        problems += _sessions_apart(served) + _cache_unchanged(served)
    return merge(each), problems


class ServedDecoder:
    """The lowered model as the harness serves it, and the texts that it runs."""

    def __init__(self, m: Materials, runner: Runner) -> None:
        self.contract, self.runner = m.contract, runner
        rows = [row[keep.astype(bool)] for b in m.batches for row, keep in _rows(b)]
        rows = sorted({tuple(r.tolist()): r for r in rows}.values(), key=len)
        self.long, self.mixed = rows[-1], [rows[0], rows[len(rows) // 2], rows[-1]]
        self.begun = [r for r in rows if len(r) > TAIL][:2] + rows[-1:]  # before the tail
        length = min(len(rows[-2]), len(rows[-1]))
        self.even = [rows[-2][:length], rows[-1][:length]]
        self._alone: dict[bytes, Array] = {}

    def steps(self, ids: Array, mask: Array, sizes: Sequence[int]) -> Array:
        """Compute the logits (batch, tokens, vocabulary) of ids in pieces.

        ids, mask: (batch, tokens)
        sizes: tokens of each piece
        """
        session = self.session(ids.shape[1])
        logits, start = [], 0
        for size in sizes:
            logits.append(session(ids, mask, start, start + size))
            start += size
        return np.concatenate(logits, 1)

    def session(self, capacity: int) -> Callable[[Array, Array, int, int], Array]:
        """Start a KV cache of `capacity` tokens and return the function (ids, mask, start, end) ->
        logits of columns start..end, whose calls continue it."""
        session = self.runner.decoder(self.contract, capacity)

        def give(ids: Array, mask: Array, start: int, end: int) -> Array:
            arrays = text_generation.build_step_arrays(
                self.contract, ids[:, start:end], mask[:, :end]
            )
            return session.step(arrays)

        return give

    def alone(self, row: Array) -> Array:
        """Compute the logits (tokens, vocabulary) of one row by itself, in one piece."""
        key = row.tobytes()
        if key not in self._alone:
            ids = row[None]
            self._alone[key] = self.steps(ids, np.ones_like(ids), [ids.shape[1]])[0]
        return self._alone[key]

    def batch(self, rows: Sequence[Array], tail: int) -> Pairs:
        """Compute the logits of rows together, the last `tail` tokens one by one, and of each row
        alone. Return [(logits in the batch, logits alone)], (tokens, vocabulary) each."""
        inputs = text_generation.arrays(self.contract, rows)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        first = ids.shape[1] - tail
        logits = self.steps(ids, mask, [first, *([1] * tail)])
        return [
            (row_logits[keep.astype(bool)], self.alone(row))
            for row_logits, keep, row in zip(logits, mask, rows, strict=True)
        ]


def _rows(batch: dict[str, Array]) -> Iterable[tuple[Array, Array]]:
    return zip(batch["input_ids"], batch["attention_mask"], strict=True)


def _in_pieces(served: ServedDecoder, size: int) -> Pairs:
    ids = served.long[None]
    whole, rest = divmod(ids.shape[1], size)
    sizes = [size] * whole + ([rest] if rest else [])
    piecewise = served.steps(ids, np.ones_like(ids), sizes)[0]
    whole_row = served.alone(served.long)
    return [(f[None], w[None]) for f, w in zip(piecewise, whole_row, strict=True)]


def _newest(served: ServedDecoder) -> Pairs:
    """Return the logits of the newest token twice: as generation computes them, for that token
    alone, and from a run that computes those of all tokens."""
    ids = served.long[None]
    arrays = text_generation.build_step_arrays(served.contract, ids, np.ones_like(ids))
    newest = served.runner.decoder(served.contract, ids.shape[1]).last(arrays)
    return [(newest, served.alone(served.long)[-1:])]


def _tail(rows: Sequence[Array]) -> int:
    return min(TAIL, min(map(len, rows)) - 1)


def _arriving(served: ServedDecoder) -> Pairs:
    """Return pairs of logits of texts in a server, of which one begins every second step, with its
    prompt in pieces, and leaves at its end, and of the same texts alone."""
    rows = [*served.begun, served.mixed[1], *served.begun]
    tail = _tail(rows)
    slots = served.runner.slots(served.contract, min(PLACES, len(rows)), max(map(len, rows)))
    waiting, pairs = list(enumerate(rows)), Pairs()
    going: dict[int, int] = {}  # text -> tokens of it that are in the cache
    while waiting or going:
        if waiting and len(going) < PLACES:
            text, row = waiting.pop(0)
            slots.open(text)
            begun = len(row) - tail
            for start in range(0, begun, PIECE):
                scores = slots.read(text, row[start : min(start + PIECE, begun)])
            going[text] = begun
            pairs.append((scores[None], served.alone(row)[begun - 1 : begun]))
        for _ in range(2):
            tokens = {text: int(rows[text][at]) for text, at in going.items()}
            for text, scores in slots.step(tokens).items() if tokens else ():
                pairs.append((scores[None], served.alone(rows[text])[going[text]][None]))
                going[text] += 1
            for text in [t for t, at in going.items() if at == len(rows[t])]:
                slots.close(text)
                del going[text]
    return pairs


Law = Callable[[ServedDecoder], Pairs]
MANY_STEPS: dict[str, Law] = {
    f"a text {PIECE} tokens at a time and in one piece": lambda s: _in_pieces(s, PIECE),
    "a text token by token and in one piece": lambda s: _in_pieces(s, 1),
    "texts that come and go and alone": _arriving,
}
LAWS: dict[str, Law] = {
    **MANY_STEPS,
    "rows padded on the left and alone": lambda s: s.batch(s.mixed, 0),
    "padded rows continued and alone": lambda s: s.batch(s.begun, _tail(s.begun)),
    "rows together and alone": lambda s: s.batch(s.even, 0),
    "rows continued together and alone": lambda s: s.batch(s.even, _tail(s.even)),
    "the newest token's logits and those of all tokens": _newest,
}


def _sessions_apart(served: ServedDecoder) -> list[str]:
    """Check law 4: return [a problem] where texts that take turns step by step get other bits than
    each text by itself, else []."""
    rows = [row[None] for row in served.even]
    masks = [np.ones_like(r) for r in rows]
    length = rows[0].shape[1]
    alone = [served.steps(r, m, [length - 1, 1])[:, -1] for r, m in zip(rows, masks, strict=True)]
    sessions = [served.session(length) for _ in rows]
    for session, row, mask in zip(sessions, rows, masks, strict=True):
        session(row, mask, 0, length - 1)
    in_turns = [
        session(row, mask, length - 1, length)[:, -1]
        for session, row, mask in zip(sessions, rows, masks, strict=True)
    ]
    same = all(np.array_equal(f, w) for f, w in zip(in_turns, alone, strict=True))
    return [] if same else ["two texts continued in turns do not give what each gives by itself"]


def _cache_unchanged(served: ServedDecoder) -> list[str]:
    """Check law 5 on the graph: return a problem where a step changes its input KV cache, or gives
    other bits when it is repeated."""
    system = OnnxDecoder(served.runner, served.contract)
    ids = served.long[None]
    mask, last = np.ones_like(ids), ids.shape[1] - 1
    _, kv_cache = system.step(ids[:, :last], mask[:, :last], None)
    before = {name: array.copy() for name, array in kv_cache.items()}
    first, again = (system.step(ids[:, last:], mask, kv_cache)[0] for _ in range(2))
    problems = [
        f"{name} is changed by the step that reads it"
        for name, array in kv_cache.items()
        if not np.array_equal(array, before[name])
    ]
    if not np.array_equal(first, again):
        problems.append("the same step from the same cache gives different bits")
    return problems
