"""Answer the rows of a data set with one system, in their order, through the harness."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeVar

import numpy as np
from torch import nn

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.foundation.process import threads
from optimizer.foundation.progress import bar
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.inputs.kind import Encoded
from optimizer.harness.runtimes.ort.run import cores
from optimizer.harness.tasks import (
    fill_mask,
    tensors,
    text_classification,
    token_classification,
    zero_shot_classification,
)
from optimizer.harness.tasks.embeddings import sparse_embedding
from optimizer.validate import target_runner
from optimizer.validate.ledger import trace
from optimizer.validate.quality.images.observed import OBSERVE
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts

Context = TypeVar("Context")
Train = tuple[Sequence[Sample], Answers]  # (rows, answers to them)
PLACES = 32
AT_ONCE = 4  # batches of a model in torch; the activations of each are in memory
Reference = tuple[Answers, Train | None]  # answers of the reference model, and for a probe


def answer_by_reference(
    m: RunArtifacts, rows: Sequence[Sample], train: Sequence[Sample] | None
) -> Reference | None:
    """Answer rows by the reference model: (answers to `rows`, (train, answers to train) for metric
    probe_accuracy, else None). None for text-generation, which is judged window by window.

    rows: evaluation rows
    train: labelled rows to which the probe is fitted; None: there are none
    """
    if tasks.look_up(m.contract).generates:
        return None
    baseline = answer(m, TorchRunner(m), rows, "validate: baseline")
    if m.section.validate_.metric != "probe_accuracy" or train is None:
        return baseline, None
    return baseline, (train, answer(m, TorchRunner(m), train, "validate: probe"))


class TorchRunner:
    """Runner of a model in torch.

    m: artifacts of the run
    model: the model; None: the reference model on its device
    """

    def __init__(self, m: RunArtifacts, model: nn.Module | None = None) -> None:
        self._model, self._outputs = model or m.answering_model, m.outputs

    @property
    def at_once(self) -> int:
        """Number of batches to compute at a time, each on one CPU thread; 1 on a GPU."""
        on_cpu = next(self._model.parameters()).device.type == "cpu"
        return min(cores(), AT_ONCE) if on_cpu else 1

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return trace.run(self._model, arrays, self._outputs)


def answer(m: RunArtifacts, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    """Answer rows with one system through the harness, and return the answers in the order of the
    rows.

    runner: the system
    label: text before the progress bar

    Inputs of similar size share a batch, so that there is little padding. Batching changes an
    answer by float rounding only.
    """
    order = [i for group in group_rows(m, rows) for i in group]
    answers = _answer(m, runner, [rows[i] for i in order], label)
    place = {row: i for i, row in enumerate(order)}

    def back(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[place[i]] for i in range(len(rows)))

    parts = back(answers.text) or (), back(answers.pair), back(answers.words)
    weighs = tasks.look_up(m.contract).weighs
    by_product = weighs and m.contract.vectors.similarity == "dot"
    spans, seen = back(answers.spans), back(answers.seen)
    return Answers(*parts, spans, by_product, answers.sizes, seen)


def count_labels(contract: Contract, answered: Answers) -> dict[str, int]:
    """Count how often each label is answered: {label: number}; {} for a model that gives an input
    no label, or several."""
    task, labels = tasks.look_up(contract), contract.labels or ()
    one_of_several = task.axes == ("batch", "labels") and len(labels) > 1 and not task.in_parts
    if not one_of_several or contract.activation is not None:
        return {}
    return dict(Counter(labels[int(row.argmax())] for row in answered.text))


def group_rows(m: RunArtifacts, rows: Sequence[Sample]) -> list[list[int]]:
    """Group rows of similar size into batches, to be answered together, and return the row numbers
    of each."""
    extent, batch_size = tasks.look_up(m.contract).inputs.extent, m.section.validate_.batch_size
    sizes = [extent(r.input) + extent(r.text_pair or "") for r in rows]
    order = sorted(range(len(rows)), key=sizes.__getitem__)
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def _infer(
    runner: Any, batches: Iterable[tuple[Batch, Context]]
) -> Iterator[tuple[Batch, Context, Any]]:
    """Run a system on batches: yield each batch with its context and the runner's outputs, in
    order. A model in torch computes several batches at a time; an engine has threads of its own."""

    def outputs(item: tuple[Batch, Context]) -> tuple[Batch, Context, Any]:
        return *item, runner.infer(item[0])

    if isinstance(runner, TorchRunner):
        yield from threads.map_in_threads(outputs, batches, runner.at_once)
    else:
        yield from map(outputs, batches)


def _answer(m: RunArtifacts, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    batch_size = m.section.validate_.batch_size
    task = tasks.look_up(m.contract)
    multi_label = m.contract.multi_label
    by_word = task.classifies and task.per_position and all(r.words is not None for r in rows)
    if task.fills:
        return _filled(m, runner, rows, label)
    if task.in_parts:
        return _in_parts(m, runner, rows, label)
    text: list[Any] = []
    pair: list[Any] = []
    words: list[Any] = []
    seen: list[Any] = []
    observe = OBSERVE.get(task.name)
    pairs = [r.text_pair for r in rows]
    apart = not task.pairs_together and m.texts_beside is None

    def encoded() -> Iterator[tuple[Batch, tuple[Sequence[Sample], bool]]]:
        """(batch, (its rows, True where it holds their second texts)) of all rows."""
        for start in bar(range(0, len(rows), batch_size), label):
            part = rows[start : start + batch_size]
            second = [r.text_pair for r in part] if task.pairs_together and any(pairs) else None
            first = [r.input for r in part]
            yield tasks.encode(m.contract, m.encoder, first, second), (part, False)
            if apart and all(p is not None for p in pairs):
                others = [str(r.text_pair) for r in part]
                yield tasks.encode(m.contract, m.encoder, others), (part, True)

    for batch, (part, of_pairs), outputs in _infer(runner, encoded()):
        values = _values(m, outputs, batch)
        if of_pairs:
            pair += _vectors(values, batch)
            continue
        text += _vectors(values, batch)
        if observe is not None:
            each = zip(values, batch.sides, part, strict=True)
            seen += [observe(m.contract, v, sides, r) for v, sides, r in each]
        if multi_label:
            words += map(np.flatnonzero, text_classification.choose_labels(m.contract, values))
        if by_word:
            words += [_tags(m, r, batch, values, i) for i, r in enumerate(part)]
    if m.texts_beside is not None and all(p is not None for p in pairs):
        pair = _captions(m.texts_beside, [str(p) for p in pairs], isinstance(runner, TorchRunner))
    sizes = () if task.output else tensors.sizes(m.contract)
    parts = tuple(text), tuple(pair) or None, tuple(words) or None
    return Answers(*parts, sizes=sizes, seen=tuple(seen) or None)


def _captions(m: RunArtifacts, texts: Sequence[str], by_reference: bool) -> list[Any]:
    """Embed the captions of images, each caption once, and return a vector for each of `texts`.

    m: artifacts of the side of texts
    by_reference: True for the float model of that side, False for its engine
    """
    known = m.captions[by_reference]
    missing = [Sample(text) for text in dict.fromkeys(texts) if text not in known]
    if missing:
        elsewhere = target_runner.explain_not_run(m)
        device = "cpu" if elsewhere else m.section.target.runs_on
        with ExitStack() as stack:
            runner: Any = TorchRunner(m)
            if not by_reference:
                runner = stack.enter_context(closing(target_runner.open_candidate(m, device)))
            answered = answer(m, runner, missing, "validate: captions")
        known |= {row.text: one for row, one in zip(missing, answered.text, strict=True)}
    return [known[text] for text in texts]


def _filled(m: RunArtifacts, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    """Mask tokens of each row, and return the log-probabilities of the true tokens and the ids of
    the likeliest ones."""
    batch_size = m.section.validate_.batch_size
    likely: list[Any] = []
    best: list[Any] = []

    def masked() -> Iterator[tuple[Batch, tuple[Batch, Any]]]:
        """(masked batch, (batch, masked places)) of all rows."""
        for start in bar(range(0, len(rows), batch_size), label):
            texts = [r.text for r in rows[start : start + batch_size]]
            batch = tasks.encode(m.contract, m.encoder, texts)
            inputs, places = fill_mask.mask_tokens(m.contract, batch)
            yield inputs, (batch, places)

    for inputs, (batch, places), outputs in _infer(runner, masked()):
        values = tasks.decode(m.contract, outputs, inputs)
        for logits, ids, chosen in zip(values, batch["input_ids"], places, strict=True):
            wide = logits[chosen].astype(np.float64)
            wide -= wide.max(-1, keepdims=True)
            right = np.take_along_axis(wide, ids[chosen][:, None], 1)[:, 0]
            likely.append(right - np.log(np.exp(wide).sum(-1)))
            best.append(wide.argmax(-1))
    return Answers(tuple(likely), None, tuple(best))


def _in_parts(m: RunArtifacts, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    """Answer rows of a task that reads an input in several rows of the model. The answers are the
    logits of all windows of a question with the answer, the evidence for each candidate label, or
    the heatmaps of all boxes. Raises DataError for a row that cannot be answered."""
    task, batch_size = tasks.look_up(m.contract), m.section.validate_.batch_size
    vectors: list[Any] = []
    spans: list[str] = []
    seen: list[Any] = []
    observe = OBSERVE.get(task.name)

    def collated() -> Iterator[tuple[Batch, list[tuple[Sample, Encoded]]]]:
        """(batch, the rows that it completes) of all rows."""
        for start in bar(range(0, len(rows), batch_size), label):
            chosen = rows[start : start + batch_size]
            encoded = encode_parts(m.contract, m.encoder, chosen)
            windows = [part for one in encoded for part in one.parts]
            for first in range(0, len(windows), batch_size):
                ended = (
                    zip(chosen, encoded, strict=True) if first + batch_size >= len(windows) else ()
                )
                yield task.inputs.collate(m.contract, windows[first : first + batch_size]), [*ended]

    left = deque[tuple[Any, Any, Any]]()
    for batch, ended, outputs in _infer(runner, collated()):
        values = tasks.decode(m.contract, outputs, batch)
        answered = tasks.build_answers(m.contract, values, batch)
        left += zip(_vectors(values, batch), answered, values, strict=True)
        for row, one in ended:
            own, parts, whole = zip(*(left.popleft() for _ in one.parts), strict=True)
            if task.chooses:
                vectors.append(zero_shot_classification.weigh_claims(parts))
                continue
            vectors.append(np.concatenate(own))
            if observe is not None:
                seen.append(observe(m.contract, np.stack(whole), one.sides, row))
            else:
                spans.append(task.merge(m.contract, parts)["answer"])
    return Answers(tuple(vectors), spans=tuple(spans) or None, seen=tuple(seen) or None)


def encode_parts(contract: Contract, encoder: Any, rows: Sequence[Sample]) -> list[Encoded]:
    """Encode inputs that the model reads in several rows each. Raises DataError for an input that
    cannot be answered."""
    pairs = None if tasks.look_up(contract).chooses else [r.text_pair for r in rows]
    encoded = tasks.encode_each(contract, encoder, [r.input for r in rows], pairs)
    for row, one in zip(rows, encoded, strict=True):
        if one.problem:
            name = row.text[:80] if row.image is None else row.image.name
            where = f"validate data: row {name!r}"
            raise DataError(one.problem, where=where, fix=one.fix)
    return encoded


def _values(m: RunArtifacts, outputs: Any, batch: Batch) -> Any:
    values = tasks.decode(m.contract, outputs, batch)
    if tasks.look_up(m.contract).weighs:
        return sparse_embedding.prune(m.contract, values)
    return text_classification.activated(m.contract, values)


def _vectors(values: Any, batch: Batch) -> list[Any]:
    """Flatten a batch of values to one vector per input. Of values per token only those of real
    tokens are kept. Values per pixel are sampled to a grid of at most PLACES a side, because all of
    them would not fit into memory."""
    if values.ndim == 2:
        return list(values)
    if batch.sides and values.ndim > 2 and min(values.shape[-2:]) > PLACES:
        rows, columns = (-(-side // PLACES) for side in values.shape[-2:])
        values = values[..., ::rows, ::columns]
    return [row[keep].ravel() for row, keep in zip(values, batch.real, strict=True)]


def _tags(m: RunArtifacts, row: Sample, batch: Batch, values: Any, i: int) -> Any:
    """Return the label id of each word of a row; -1 for a word that was truncated.

    values: the model's values for the batch
    i: index of the row in the batch
    """
    names = list(m.contract.labels or ())
    labels = token_classification.word_labels(
        m.contract, row.text, batch.encodings[i], values[i], m.encoder
    )
    by_start = {start: names.index(label) for start, label in labels.items()}
    ids, start = [], 0
    for word in row.words or ():
        ids.append(by_start.get(start, -1))
        start += len(word) + 1
    return np.array(ids)
