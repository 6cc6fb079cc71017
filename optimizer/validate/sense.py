"""Check that inputs are plausible and that a comparison with the float model can mean anything: the
report's `sense`.

texts      {place in the recipe: counts of data/input_sense/ as a dict, with their warnings}; for a
           model of images `images`, of arrays `rows`
tokenizer  sha256 of the file that tokenized the texts
reference  the float model compared with chance: {metric, verdict, value, expected, reach, p, ...,
           warnings}; verdict: above chance, too few rows to tell, not labelled, below chance

The checks of arrays raise DataError with the cause; their other findings go into the report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.data import input_sense
from optimizer.data.answers import SCORES
from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.tasks import Task
from optimizer.load.config import image_processor
from optimizer.recipe.schema import Validation
from optimizer.store import digest_file
from optimizer.validate.gates import Gate
from optimizer.validate.quality import chance, evaluation, metrics, quality
from optimizer.validate.quality.answers import Reference
from optimizer.validate.quality.chance import Agreement, Chance, Labels
from optimizer.validate.quality.images.detection import Found
from optimizer.validate.quality.images.observed import chosen_labels
from optimizer.validate.quality.metrics import RANKING, RECALL, Ranking
from optimizer.validate.quality.quality import Answers, Probe
from optimizer.validate.quality.significance import Floats
from optimizer.validate.run_artifacts import RunArtifacts

ROUNDING = float(np.finfo(np.float32).eps)
Labelled = tuple[list[Labels], list[Labels], int]
"""(truth, answers, number of labels): label ids (words,) per text."""


def measure_inputs(
    section: Validation, source: Path, data: Mapping[str, Sequence[Sample]]
) -> dict[str, Any]:
    """Measure `texts` (or `images`) and `tokenizer` of the report. Raises DataError where the
    inputs of a set look alike to the model.

    source: folder of load
    data: rows by their place in the recipe
    """
    contract = contracts.read(source / "contract.json")
    kind, sense = tasks.look_up(contract).inputs, input_sense.get_sense(contract)
    encoder = kind.open(source / "checkpoint", contract)
    sets: dict[str, Any] = {}
    of_reduce = section.reduce.calibrate if section.reduce else None
    for name, rows in data.items():
        calibrate = {"calibrate": section.calibrate, "reduce.calibrate": of_reduce}.get(name)
        length = calibrate.sequence_length if calibrate else None
        try:
            measured = sense.measure(rows, contract, encoder, length)
        except DataError as e:
            raise DataError(e.problem, where=f"{name} data: {e.where}", fix=e.fix) from e
        sense.check(measured, name)
        sets[name] = {**asdict(measured), "warnings": sense.warnings(measured, name)}
    document = {f"{kind.name}s": sets}
    if contract.tokenizer is None:
        return document
    file = source / "checkpoint" / contract.tokenizer.file
    return {**document, "tokenizer": digest_file(file)}


def check_reference(
    m: RunArtifacts,
    data: Mapping[str, Sequence[Sample]],
    rows: Sequence[Sample],
    answered: Reference | None,
) -> dict[str, Any]:
    """Check the inputs and the float model, and return the report's `sense`. For text-generation,
    `reference` follows later from check_comparison.

    data: rows by their place in the recipe
    rows: rows of validate.data with the model's label ids
    answered: the float model's answers to them (answers.answer_by_reference); None for
        text-generation

    Raises DataError for a float model that answers every text alike or is not better than chance on
    labelled rows, and where measure_inputs does.
    """
    texts = measure_inputs(m.section, m.source, data)
    if answered is None:
        return texts
    settings, (baseline, train) = m.section.validate_, answered
    terms = max(int(p.shape[-1]) for p in m.parameters.values() if p.ndim > 1)
    check_answers_differ(baseline.text, terms)
    if baseline.seen is not None:
        check_masks(m, rows)
        check_metric_can_be_lost(settings.metric, rows, baseline, settings.max_drop)
    if settings.metric == "agreement" and baseline.words is None:
        check_agreement_can_be_lost(baseline, settings.max_drop)
    labelled = pair_labelled_answers(
        settings.metric, tasks.look_up(m.contract), rows, baseline, train
    )
    unlabelled = None if labelled else measure_agreement(settings.metric, rows, baseline)
    names = m.contract.labels
    section = compare_with_chance(
        settings.metric, labelled, unlabelled, names, settings.confidence, baseline.seen is not None
    )
    print_warnings(section["warnings"])
    return {**texts, "reference": section}


def check_comparison(
    m: RunArtifacts, judged: Sequence[Gate], quality: dict[str, Any], place: str = "validate.data"
) -> dict[str, Any]:
    """Check that the examples of a comparison differ, and return {"reference": section} of
    text-generation; {} for other tasks. Raises DataError where all examples are copies of one.

    judged: the quality gates
    quality: their section of the report
    place: path in the recipe of the rows
    """
    check_examples_differ(judged, quality["examples"], place)
    if not tasks.look_up(m.contract).generates:
        return {}
    section = judge_perplexity(quality, m.contract.decoder.vocabulary)
    print_warnings(section["warnings"])
    return {"reference": section}


def print_warnings(sentences: Sequence[str]) -> None:
    """Print warnings of validate about data and float model, which stop nothing."""
    for sentence in sentences:
        say(f"warning: {sentence}")


def check_answers_differ(vectors: Sequence[Floats], terms: int) -> None:
    """Raise DataError where all texts get the same answer, within the rounding of a sum of `terms`
    products relative to the largest value (Higham 2002, section 3.1).

    vectors: one answer per text; of different lengths, only their ends are compared
    """
    shortest = min(v.size for v in vectors)
    ends = np.stack([np.asarray(v, np.float64).ravel()[v.size - shortest :] for v in vectors])
    apart, size = float(np.ptp(ends, axis=0).max()), float(np.abs(ends).max())
    if len(ends) < 2 or apart > terms * ROUNDING * size:
        return
    raise DataError(
        f"the float model gives {len(ends)} different inputs one answer (its numbers differ by at "
        f"most {apart:.1e}, the largest is {size:.3g})",
        where="validate.data",
        accepted="a model whose outputs depend on its input",
        fix="Check that the weights are those of a trained model, and of texts the tokenizer.",
    )


def check_masks(m: RunArtifacts, rows: Sequence[Sample]) -> None:
    """Raise DataError where the processor subtracts 1 from values of masks, and the data do not
    say if theirs need that."""
    if rows[0].mask is None or m.section.validate_.data.reduce_labels is not None:
        return
    for file in (m.source / "checkpoint" / name for name in image_processor.FILES):
        if file.is_file() and json.loads(file.read_text("utf-8")).get("do_reduce_labels"):
            raise DataError(
                "reduce_labels is missing, and the model's processor has do_reduce_labels: true",
                where="validate.data",
                accepted="reduce_labels: true where masks hold label ids plus 1, and 0 for what "
                "does not count; false where they hold label ids",
            )


def check_metric_can_be_lost(
    metric: str, rows: Sequence[Sample], baseline: Answers, margin: float
) -> None:
    """Raise DataError where a model without any right answer would pass, because the float model's
    own value of a metric from 0 to 1 is at most `margin`; and where the metric itself does."""
    same = quality.compare(metric, rows, baseline, baseline)
    value = float(same.baseline(np.ones((1, len(rows))))[0])
    if not 0 <= value <= margin:
        return
    raise DataError(
        f"the float model's {metric} is {value:.3g}, so a model without any right answer "
        f"would lose no more than max_drop, which is {margin:g}",
        where="validate.data",
        accepted="rows on which the float model's value is above max_drop",
        fix="Check that labels, boxes, masks and depths belong to these images and to this model; "
        "or lower max_drop.",
    )


def check_agreement_can_be_lost(baseline: Answers, margin: float) -> None:
    """Raise DataError where a constant answer would pass metric agreement, because at most the
    share `margin` of the float model's answers differ from its commonest one."""
    chosen = baseline.spans or chosen_labels(baseline.seen)
    chosen = np.stack(baseline.text).argmax(1) if chosen is None else chosen
    if not len(chosen):  # of objects, whose agreement a constant answer loses
        return
    _, counts = np.unique(chosen, return_counts=True)
    others = 1 - float(counts.max()) / float(counts.sum())
    if others > margin:
        return
    raise DataError(
        f"the float model gives {counts.max()} of {counts.sum()} answers one label, so one that "
        f"gives it to all would lose only {others:.3g}, and max_drop is {margin:g}",
        where="validate.data",
        accepted="for metric agreement, a share of rows above max_drop with other labels",
        fix="Add rows of other classes, or lower max_drop.",
    )


def pair_labelled_answers(
    metric: str, task: Task, rows: Sequence[Sample], baseline: Answers, train: Any
) -> Labelled | None:
    """Return (labels, answers, number of labels) that the metric compares, label ids (words,) of
    each row, or of the objects in it that the model finds in their place; None where the metric or
    the rows have no labels.

    train: labelled rows and the float model's answers to them, for probe_accuracy
    """
    objects = [one.labels for one in baseline.seen or () if isinstance(one, Found)]
    each = [pairs for pairs in objects if len(pairs)]
    if each and len(np.unique(np.concatenate(each)[:, 0])) > 1:
        truth, answers = [o[:, 0] for o in each], [o[:, 1] for o in each]
        return truth, answers, 1 + int(_largest(truth, answers))
    if metric == "probe_accuracy" and train and all(r.label is not None for r in train[0]):
        probe = Probe.fit(np.stack(train[1].text), np.array([r.label for r in train[0]]))
        classes = probe.predict(np.stack(baseline.text))
    elif task.classifies and not task.per_position and baseline.text[0].size > 1:
        classes = np.stack(baseline.text).argmax(1)
    elif task.classifies and baseline.words is not None:
        truth = [np.array(r.tags) for r in rows if r.tags is not None]
        if len(truth) < len(rows):
            return None
        return truth, list(baseline.words), 1 + int(_largest(truth, list(baseline.words)))
    else:
        return None
    if any(r.label is None for r in rows):
        return None
    truth = [np.array([r.label]) for r in rows]
    answers = list(classes[:, None])
    return truth, answers, 1 + int(_largest(truth, answers))


def _largest(truth: Sequence[Labels], predicted: Sequence[Labels]) -> int:
    return max(int(np.concatenate([*truth, *predicted]).max()), 1)


def measure_agreement(metric: str, rows: Sequence[Sample], baseline: Answers) -> Agreement | None:
    """Measure the agreement of a metric without class labels: spearman, retrieval, and those of
    RANKING. None for other metrics, and where rows lack a column that the metric needs
    (quality.compare raises for it)."""
    if baseline.spans is not None:
        right = [r.answers for r in rows if r.answers is not None]
        if metric not in SCORES or len(right) < len(rows):
            return None
        return chance.agree_on_spans(metric, right, baseline.spans)
    if metric in ("f1", "micro_f1") and all(r.labels is not None for r in rows):
        count, sets = len(baseline.text[0]), [r.labels or () for r in rows]
        return chance.agree_on_sets(
            metrics.make_indicators(sets, count),
            metrics.make_indicators(baseline.words or (), count),
        )
    if metric in RANKING:
        ranked = evaluation.group_ranking(metric, rows)
        if ranked.left_out:
            say(f"validate: {metric}: {_left_out(ranked)}")
        return chance.agree_on_ranking(ranked, quality.score_pairs(baseline)[ranked.rows])
    if metric in RECALL and baseline.pair is not None:
        texts = np.arange(len(rows))
        return chance.matches(texts, texts[quality.find_nearest(baseline)])
    needed = "score" if metric == "spearman" else "text_pair" if baseline.pair else "label"
    if any(getattr(r, needed) is None and r.scores is None for r in rows):
        return None
    if metric == "spearman":
        scores = quality.read_targets(rows)
        return chance.rank_correlation(quality.score_pairs(baseline, scores.shape[1:]), scores)
    if metric == "retrieval":
        nearest = quality.find_nearest(baseline)
        if baseline.pair is None:
            return chance.agree_with_nearest(np.array([r.label for r in rows]), nearest)
        pairs = np.array([r.text_pair for r in rows])
        return chance.matches(pairs, pairs[nearest])
    return None


def _left_out(ranked: Ranking) -> str:
    count = len(ranked.starts) + ranked.left_out
    return (
        f"{ranked.left_out} of {count} queries are left out: they have one document, or documents "
        "that are all equally relevant"
    )


def compare_with_chance(
    metric: str,
    labelled: Labelled | None,
    unlabelled: Agreement | None,
    names: Sequence[str] | None,
    confidence: float,
    of_objects: bool = False,
) -> dict[str, Any]:
    """Compare the float model with answers that do not depend on the labels, and return the
    report's sense.reference.

    labelled: result of pair_labelled_answers
    unlabelled: result of measure_agreement; where both are None nothing is judged
    names: names of the labels; None: the model has none
    of_objects: True for labels of objects that the model found in the right places. If nearly all
        have one label, answers by chance are as good, and the model may be right

    Raises DataError for a model that is not better, where there are enough rows to tell (not for
    objects), or where exchanged labels fit better.
    """
    if labelled is None and unlabelled is None:
        return {"verdict": "not labelled", "warnings": []}
    judged = unlabelled if labelled is None else chance.agree_on_labels(labelled[0], labelled[1])
    assert judged is not None
    decided = chance.compare_with_chance(judged, confidence)
    reading = None
    if labelled is not None and not decided.above:
        reading = chance.find_exchange(*labelled, confidence)
    turned = False
    if labelled is None and metric == "spearman" and not decided.above:
        turned = chance.compare_with_chance(_negated(judged), confidence).above
    enough = decided.enough and not of_objects
    if not decided.above and (enough or reading or turned):
        hint = _reading(reading, names) if reading else _alike(labelled, names)
        raise _chance_error(metric, decided, hint, turned, confidence)
    section = {"metric": metric, "verdict": "above chance", **asdict(decided), "warnings": []}
    if not decided.above:
        section["verdict"] = "too few rows to tell"
        section["warnings"] = [
            f"the float model's {_name_of(metric)} is {decided.value:.3f}, and answers independent "
            f"of the labels reach {decided.reach:.3f}: these rows are too few, or too similar, to "
            "tell the two apart"
        ]
    elif labelled is not None:
        section["warnings"] = _doubts(labelled, decided, names, confidence)
    return section


def _negated(of: Agreement) -> Agreement:
    return Agreement(-of.value, of.best, of.draw)  # its distribution under chance is symmetric


def _chance_error(
    metric: str, decided: Chance, hint: str, turned: bool, confidence: float
) -> DataError:
    if turned:
        hint = (
            "Are the scores distances where similarities are expected? Negated they agree by "
            f"{-decided.value:.3f}. "
        )
    return DataError(
        f"the float model's {_name_of(metric)} is {decided.value:.3f}, no better than chance: "
        f"answers independent of the labels reach {decided.expected:.3f} on average, and exceed "
        f"{decided.reach:.3f} with probability {1 - confidence:.0%}",
        where="validate.data",
        accepted="a float model that is better than chance, so that a loss can be measured",
        fix=hint
        + "Check that labels and texts belong together, and that the head of the checkpoint is "
        "trained.",
    )


def _name_of(metric: str) -> str:
    named = ("probe_accuracy", "spearman", "retrieval", *RANKING)
    return metric if metric in named else "accuracy"


def _name(label: int, names: Sequence[str] | None) -> str:
    return names[label] if names and 0 <= label < len(names) else f"label {label}"


def _alike(labelled: Labelled | None, names: Sequence[str] | None) -> str:
    """Write a sentence with the answer, where all answers are the same; else ""."""
    different = np.unique(np.concatenate(labelled[1])) if labelled else np.empty(0, np.int64)
    if len(different) != 1:
        return ""
    return f"It answers {_name(int(different[0]), names)} to every text. "


def _reading(reading: Sequence[int], names: Sequence[str] | None) -> str:
    moved = [f"{_name(a, names)} as {_name(t, names)}" for a, t in enumerate(reading) if a != t]
    more = ", …" if len(moved) > 4 else ""
    return (
        "Are the labels swapped? The answers are better than chance when one reads "
        f"{', '.join(moved[:4])}{more}: compare labels in the data spec with id2label and label2id "
        "of the checkpoint, or with model.detections. "
    )


def _doubts(
    labelled: Labelled, decided: Chance, names: Sequence[str] | None, confidence: float
) -> list[str]:
    truth, answers, labels = labelled
    doubts = []
    reading = chance.find_better_reading(truth, answers, labels, confidence)
    if reading:
        doubts.append("part of the labels: " + _reading(reading, names).strip())
    _, counts = np.unique(np.concatenate(truth), return_counts=True)
    constant = float(counts.max() / counts.sum())
    if constant > decided.value:
        doubts.append(
            f"always answering the commonest label alone is right in {constant:.3f} of the cases, "
            f"the float model in {decided.value:.3f}"
        )
    return doubts


def judge_perplexity(section: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Make the report's sense.reference of text-generation. A perplexity above the size of the
    vocabulary, worse than uniform guessing, is a warning: text has no labels that could be wrong.

    section: the quality section
    vocabulary: number of tokens in the vocabulary
    """
    perplexity = section["baseline"]
    low = perplexity["interval"][0]
    odd = math.isfinite(low) and low > vocabulary
    warning = (
        f"the float model's perplexity is {perplexity['value']:.4g}, and uniform guessing among "
        f"all {vocabulary} tokens would be better: check that tokenizer and text fit the model"
    )
    return {
        "metric": "perplexity",
        "verdict": "below chance" if odd else "above chance",
        "value": perplexity["value"],
        "expected": vocabulary,
        "warnings": [warning] if odd else [],
    }


def check_examples_differ(
    gates: Sequence[Gate], examples: int, place: str = "validate.data"
) -> None:
    """Raise DataError where a quality gate measured a loss with an interval of no width, because
    all examples are then copies of one. A loss of 0 in every example is accepted.

    examples: number of examples
    place: path in the recipe of the rows
    """
    for gate in gates:
        if gate.interval is None or gate.measured is None or gate.measured in (0.0, 1.0):
            continue
        low, high = (math.nan if end is None else end for end in gate.interval)
        if high - low <= ROUNDING * abs(gate.measured):
            raise DataError(
                f"all {examples} examples measure {gate.measured:.6g} for {gate.name}, so the "
                "interval has no width: they are copies of one example",
                where=place,
                accepted="examples that differ",
                fix="Give other rows, and check that the tokenizer is the model's own.",
            )
