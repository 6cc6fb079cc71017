"""Check answers to questions against transformers' own post-processing, written again in float64.

compared   answers of the harness (windows encoded, batched, run, decoded and merged as in a bundle)
           with those of QuestionAnsweringPipeline.postprocess of transformers 4.57 to the same rows
           of the model's outputs; transformers 5 has no such pipeline
           https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/pipelines/question_answering.py
limit      texts and offsets equal; scores within the float32 rounding of two softmaxes, their
           product and the sum over windows. Where two answers are that near, each is right
caught     a fault in one field at a time: test_a_fault_in_a_field_of_an_answer_is_caught
caller     hop harness
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks.answering import Query
from optimizer.validate.ledger import inputs as ledger_inputs
from optimizer.validate.ledger.laws.answer_fields import FREE, Near
from optimizer.validate.ledger.laws.answer_laws import ANSWERED, ReferencePipeline, bound_rounding
from optimizer.validate.ledger.laws.rows import comparison
from optimizer.validate.ledger.pieces.roundoff import SMALLEST, UNIT
from optimizer.validate.materials import Materials

WORDS = 6  # length of a test question, cut from the start of another text


def compare_answers(m: Materials, served: Contract, encoder: Any, runner: Runner) -> list[str]:
    """Problems of the harness's answers about the ledger's texts.

    served: the harness's contract
    encoder: the harness's tokenizer
    runner: the model that the harness runs
    """
    texts = list(dict.fromkeys(m.texts))
    contexts = [
        *texts[:: -(-len(texts) // ANSWERED)],
        ledger_inputs.make_overlong(m.contract, texts),
    ]
    questions = [" ".join(text.split()[:WORDS]) for text in (*contexts[1:], contexts[0])]
    queries = [
        Query(f"text {i + 1}", *both)
        for i, both in enumerate(zip(questions, contexts, strict=True))
    ]
    reference = ReferencePipeline(m.contract, m.source / "checkpoint")

    def windows(query: Query) -> Sequence[Any]:
        return encode(reference, query.input, query.pair)

    return comparison.compare(
        served,
        encoder,
        runner,
        queries,
        lambda query: [window.ids for window in windows(query)],
        lambda query, rows: expected(reference, query.pair, windows(query), rows),
    )


def encode(reference: ReferencePipeline, question: str, context: str) -> Sequence[Any]:
    """Encode for the reference a question and its context by transformers' tokenizer and return the
    windows."""
    encoded = reference.tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=reference.contract.text.max_length,
        stride=reference.contract.spans.doc_stride,
        return_overflowing_tokens=True,
    )
    windows: Sequence[Any] = encoded.encodings
    return windows


def expected(
    reference: ReferencePipeline, context: str, windows: Sequence[Any], logits: Sequence[Array]
) -> Any:
    """Return the reference's answer to a question.

    windows: result of `encode`
    logits: scores (tokens, 2) of start and end, one array per window
    """
    settings = reference.contract.spans
    count = 2 * settings.top_k + 10
    candidates: list[dict[str, Any]] = []
    nulls: list[Near] = []
    for window, row in zip(windows, logits, strict=True):
        classes = np.array(window.ids) == reference.tokenizer.cls_token_id
        kept = (np.array(window.sequence_ids) == 1) | classes
        (start, start_bound), (end, end_bound) = (_softmax(row[:, i], kept) for i in (0, 1))
        bounds = np.outer(start_bound, end) + np.outer(start, end_bound)
        product = np.outer(start, end)
        bounds += UNIT["fp32"] * product + SMALLEST["fp32"]
        nulls.append(Near(product[0, 0], bounds[0, 0]))
        start[0] = end[0] = 0.0
        spans = np.tril(np.triu(np.outer(start, end)), settings.max_answer_len - 1)
        order = np.argsort(-spans, axis=None, kind="stable")
        if _near(spans.flat[order[: count + 1]], bounds.flat[order[: count + 1]], count - 1):
            return FREE  # one of two spans is among the best
        for first, last in zip(*np.unravel_index(order[:count], spans.shape), strict=True):
            if spans[first, last] <= 0 or not (kept[first] and kept[last]):
                continue
            low, high = _characters(window, int(first), int(last))
            text, score = context[low:high], spans[first, last]
            same = next((f for f in candidates if f["answer"].lower() == text.lower()), None)
            if same is None:
                same = {"answer": text, "score": 0.0, "bound": 0.0, "start": low, "end": high}
                candidates.append(same)
            same["score"] += score
            same["bound"] += bounds[first, last] + UNIT["fp32"] * same["score"]
    if settings.handle_impossible_answer:
        null = min(nulls, key=lambda near: float(near.values))
        empty = {"answer": "", "start": 0, "end": 0}
        candidates.append({**empty, "score": null.values, "bound": null.bounds})
    candidates.sort(key=lambda f: -f["score"])
    scores, bounds = (np.array([f[name] for f in candidates]) for name in ("score", "bound"))
    if not candidates or any(_near(scores, bounds, at) for at in range(settings.top_k)):
        return FREE
    listed = [
        {n: f[n] for n in ("answer", "start", "end")} | {"score": Near(f["score"], f["bound"])}
        for f in candidates[: settings.top_k]
    ]
    return {**listed[0], **({"answers": listed} if settings.top_k > 1 else {})}


def _softmax(logits: Array, kept: Array) -> tuple[Array, Array]:
    """Compute the reference's (probabilities of the kept tokens in float64, their float32 bounds),
    both (tokens,).

    logits: (tokens,)
    kept: (tokens,), True for tokens that an answer may contain
    """
    values = logits.astype(np.float64)
    powers = np.where(kept, np.exp(values - values[kept].max()), 0.0)
    bounds = np.zeros(len(values))
    bounds[kept] = bound_rounding(logits[kept])
    return powers / powers.sum(), bounds


def _near(scores: Array, bounds: Array, at: int) -> bool:
    """Return True where the scores at places `at` and `at` + 1 are equal within their bounds, so
    that their order may differ."""
    if at + 1 >= len(scores) or scores[at + 1] <= 0:
        return False
    return bool(scores[at] - scores[at + 1] <= bounds[at] + bounds[at + 1])


def _characters(window: Any, first: int, last: int) -> tuple[int, int]:
    """Return (start, end) in characters of the expected answer from token `first` to token `last`,
    as the pipeline's get_indices does with align_to_words."""
    try:
        words = window.token_to_word(first), window.token_to_word(last)
        return window.word_to_chars(words[0], 1)[0], window.word_to_chars(words[1], 1)[1]
    except Exception:  # as there: some tokenizers have no words
        return window.offsets[first][0], window.offsets[last][1]
