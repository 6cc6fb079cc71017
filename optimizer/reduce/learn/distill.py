"""Distillation: train a student to answer as its teacher does.

The losses are those of methods/losses.py, each divided by its value on held-out data before the
first step, and multiplied by its weight in the recipe. Both models run in eval mode, so a step
depends on its number alone. pair.py chooses the parts of the two models that are compared.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimizer.data import datasets
from optimizer.foundation.errors import DataError
from optimizer.foundation.process.launch import ALONE, Processes
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import encode, load_tokenizer
from optimizer.recipe.recover import Learning
from optimizer.recipe.schema import DataSpec
from optimizer.reduce.learn import rate_search, width_maps
from optimizer.reduce.learn.pair import Batch, TeacherAndStudent
from optimizer.reduce.learn.processes import count_of
from optimizer.reduce.learn.training import Curve, TrainingOptions, train
from optimizer.reduce.methods.batch_order import choose_batch

TOKENIZED = 1024  # texts tokenized at once to count their tokens
LOGITS = 1 << 26  # maximum logits at once, which are the largest tensors of a step


@dataclass(frozen=True)
class TrainingTexts:
    """Texts for training or for held-out losses, encoded on demand.

    rows: data rows (datasets.Sample), or windows of token ids
    """

    rows: Sequence[Any]
    contract: Contract
    tokenizer: Any
    sequence_length: int

    @cached_property
    def lengths(self) -> list[int]:
        """Return the length of each training text in tokens, after the truncation of `batch`.
        Sorting by characters instead would leave a quarter of a batch to padding."""
        if not isinstance(self.rows[0], datasets.Sample):
            return [self.sequence_length] * len(self.rows)
        limit = min(self.sequence_length, tasks.longest(self.contract))
        sizes: list[int] = []
        for start in range(0, len(self.rows), TOKENIZED):
            part = self.rows[start : start + TOKENIZED]
            first, second = [r.text for r in part], [r.text_pair for r in part]
            encoded = encode(self.contract, self.tokenizer, first, second, limit)
            sizes += [e.size for e in encoded]
        return sizes

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return {input: tensor} of the texts at `indices`, padded to one batch as the harness
        does."""
        rows = [self.rows[i] for i in indices]
        if not isinstance(rows[0], datasets.Sample):
            ids = torch.stack([torch.as_tensor(r, dtype=torch.int64) for r in rows])
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arrays = next(
            datasets.encode_batches(
                rows, self.contract, self.tokenizer, len(rows), self.sequence_length
            )
        )
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def labels(self, indices: Sequence[int]) -> Tensor | None:
        """Return the label ids of the texts at `indices`; None if a text has no label."""
        ids = [getattr(self.rows[i], "label", None) for i in indices]
        return None if None in ids else torch.tensor(ids)


class Split(NamedTuple):
    """Texts to train on, and held-out texts for measuring losses. No row is in both."""

    learned: TrainingTexts
    held_out: TrainingTexts


def draw_texts(section: Learning, spec: DataSpec, contract: Contract, checkpoint: Path) -> Split:
    """Draw texts to train on, and held-out texts, with section.seed; no row is in both.

    spec: section.data, or calibrate.data where the section names no data
    checkpoint: folder with the tokenizer

    Raises DataError when there is too little text.
    """
    tokenizer = load_tokenizer(checkpoint, contract)
    windows = tasks.look_up(contract).calibration_items == "windows"
    sequence_length = section.sequence_length
    rows: Sequence[Any] = datasets.read_samples(
        spec, None if windows else section.samples, section.seed
    )
    if windows:
        rows = datasets.cut_windows(rows, tokenizer, contract, sequence_length)[: section.samples]
    else:
        rows = datasets.map_labels(rows, spec, contract.labels)
    needed = section.held_out + section.batch_size
    if len(rows) < needed:
        items = f"windows of {sequence_length} tokens" if windows else "texts"
        raise DataError(
            f"{len(rows)} {items}, of which {section.held_out} are held out",
            where=f"{section.PLACE}.data",
            accepted=f"{needed} or more: the held-out ones, and one batch",
            fix=f"Give more text, or lower {section.PLACE}.held_out or batch_size.",
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(section.seed))
    parts = order[section.held_out :].tolist(), order[: section.held_out].tolist()
    learned, held_out = ([rows[i] for i in sorted(part)] for part in parts)
    return Split(
        TrainingTexts(learned, contract, tokenizer, sequence_length),
        TrainingTexts(held_out, contract, tokenizer, sequence_length),
    )


@dataclass(frozen=True)
class Distilled:
    """Result of training a student on the outputs of its teacher.

    weights: {parameter: trained value}
    curve: losses during the training
    start: {loss: value on held-out data} before the first step
    end: {loss: value on held-out data} with the final weights
    tried: (learning rate, loss) of each trial, where the rate was searched
    """

    weights: Mapping[str, Tensor]
    curve: Curve
    start: Mapping[str, float]
    end: Mapping[str, float]
    learning_rate: float
    tried: Sequence[tuple[float, float]] = ()


def distill(
    pair: TeacherAndStudent,
    section: Learning,
    split: Split,
    folder: Path,
    *,
    keep_seconds: float = 60.0,
    processes: Processes = ALONE,
) -> Distilled:
    """Train the pair's student in place; afterwards its parameters have the best values found.

    section: losses and options of the training
    split: texts to train on, and held-out texts
    folder: folder for checkpoints
    keep_seconds: seconds between checkpoints
    processes: see `train`

    Raises CheckpointError for a teacher that answers differently twice, or a loss that is not
    finite.
    """
    learned = split.learned
    judged = _batches(split.held_out, section)
    pair.check_teacher(judged[0][0])
    if section.losses.hidden and not pair.same_width:
        pair = replace(
            pair, maps=width_maps.fit_initial_maps(pair, _batches_of_steps(learned, section))
        )
    trained = {**pair.trained, **pair.map_parameters}
    processes.copy_first(trained.values())
    start = _mean(pair, section, judged, processes)
    units = {name: value or 1.0 for name, value in start.items()}
    weights = {name: getattr(section.losses, name) / unit for name, unit in units.items()}
    size = choose_rows_at_once(pair, section)
    for p in trained.values():
        p.requires_grad_(True)

    def backward(step: int) -> float:
        indices = choose_batch(step, learned.lengths, section.batch_size, section.seed)
        share, total = processes.share(indices), 0.0
        for part in (share[i : i + size] for i in range(0, len(share), size)):
            batch, labels = learned.batch(part), learned.labels(part)
            with torch.enable_grad():
                each = pair.losses(
                    batch, labels, section.losses, section.temperature, pair.products
                )
                loss = torch.stack([weights[n] * v for n, v in each.items() if weights[n]]).sum()
                loss = loss * (len(part) / len(indices))
            loss.backward()
            total += float(loss.detach())
        return total

    def judge() -> float:
        each = _mean(pair, section, judged, processes)
        if is_judged_by_output(section):
            return each["output"]
        return math.fsum(weights[n] * each[n] for n in each)

    options = _options(section, pair, keep_seconds)
    curve, rate, tried = _search_and_train(trained, (backward, judge), options, folder, processes)
    for p in trained.values():
        p.requires_grad_(False)
    end = _mean(pair, section, judged, processes)
    for name, value in start.items():
        say(f"{section.step}: {name} on held-out data {value:.4g} -> {end[name]:.4g}")
    values = {name: p.detach().cpu() for name, p in pair.trained.items()}
    return Distilled(values, curve, start, end, rate, tried)


def _batches_of_steps(learned: TrainingTexts, section: Learning) -> Iterator[Batch]:
    for step in itertools.count():
        indices = choose_batch(step, learned.lengths, section.batch_size, section.seed)
        yield learned.batch(indices)


def _options(section: Learning, pair: TeacherAndStudent, keep_seconds: float) -> TrainingOptions:
    return TrainingOptions(
        section.steps,
        0.0 if section.learning_rate == "auto" else section.learning_rate,
        section.warmup,
        section.patience,
        None if section.max_hours is None else section.max_hours * 3600,
        dict(pair.rates),
        dict(pair.shares),
        section.PLACE,
        keep_seconds,
        count_of(section),
        pair.reach,
    )


def _search_and_train(
    trained: Mapping[str, nn.Parameter],
    losses: tuple[Callable[[int], float], Callable[[], float]],
    options: TrainingOptions,
    folder: Path,
    processes: Processes,
) -> tuple[Curve, float, Sequence[tuple[float, float]]]:
    """Train, after a search of the rate where the recipe sets none. Returns (curve, rate, trials).
    losses: backward and held_out of `train`."""
    tried: Sequence[tuple[float, float]] = ()
    if options.learning_rate == 0:
        search = rate_search.search_rate(trained, *losses, options, folder, processes)
        options = rate_search.derive_options(search, options, processes)
        tried = search.tried
    curve = train(trained, *losses, options, folder, processes)
    return curve, options.learning_rate, tried


def is_judged_by_output(section: Learning) -> bool:
    """Return True where the best weights are those with the lowest held-out loss of the output
    alone. It is False where the output's loss has no weight or the loss on labels has one: then the
    lowest weighted sum of all losses decides."""
    return section.losses.output > 0 and section.losses.labels == 0


def measure_losses(
    pair: TeacherAndStudent, section: Learning, held_out: TrainingTexts
) -> dict[str, float]:
    """Return {loss: mean over all held-out texts} of the student with its present weights."""
    return _mean(pair, section, _batches(held_out, section))


def _batches(held_out: TrainingTexts, section: Learning) -> list[tuple[Batch, Tensor | None]]:
    """Return [(batch, label ids or None)] of all held-out texts; each batch has texts of similar
    length."""
    order = sorted(range(len(held_out.rows)), key=lambda i: (held_out.lengths[i], i))
    batch_size = section.batch_size
    parts = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    return [(held_out.batch(part), held_out.labels(part)) for part in parts]


def choose_rows_at_once(pair: TeacherAndStudent, section: Learning) -> int:
    """Return the maximum number of rows of a batch whose gradients are computed together."""
    if not pair.task.generates:
        return section.batch_size
    return max(1, LOGITS // (pair.contract.decoder.vocabulary * section.sequence_length))


@torch.no_grad()
def _mean(
    pair: TeacherAndStudent,
    section: Learning,
    judged: Sequence[tuple[Batch, Tensor | None]],
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Return {loss: mean over all texts} of the student that is trained.

    judged: [(batch, label ids or None)] of held-out texts
    """
    size = choose_rows_at_once(pair, section)
    sums = dict.fromkeys(
        pair.loss_names(section.losses, any(labels is not None for _, labels in judged)), 0.0
    )
    count = 0
    for full, labels in processes.share(judged):
        for i in range(0, len(full["input_ids"]), size):
            batch = {name: t[i : i + size] for name, t in full.items()}
            some = None if labels is None else labels[i : i + size]
            each = pair.losses(batch, some, section.losses, section.temperature)
            together = len(batch["input_ids"])
            count += together
            for name, value in each.items():
                sums[name] += float(value) * together
    *values, rows = processes.sums([*sums.values(), count])
    return {name: value / rows for name, value in zip(sums, values, strict=True)}
