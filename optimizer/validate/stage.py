"""validate: is what was built the model that was asked for, as good and as fast as promised?

Writes report.json:
    target        "onnxruntime-cpu"
    machine       {cpu, cores, torch_capability, threads} the ledger ran on: torch_capability is
                  the name of the kernels that torch chose ("AVX512"), threads those of torch
    verdict       the worst gate's: pass | fail | inconclusive
    gates         [{name, verdict, measured, limit, interval, message}]
    ledger        [{hop, from, tolerance, measured, ok, why, problems, unproven, pieces, spread}],
                  see hops.Entry; ok null: not run here, why; `optimize explain` words it
    quality       see quality.py, for text-generation perplexity.py; with a note when another
                  runtime answered for the engine
    speed         see speed.py and generation_speed.py; null when this machine cannot run the engine
    not_measured  {section: why} for each part this machine could not carry out
    engine        {deferred, why} when the engine is not built here
    modules       the compress stage's row per module
    fallbacks     modules that run wider than asked, or stayed float, and why
A gate that does not pass is no exception: the report says it, and the exit code follows from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.machine import this_machine
from optimizer.harness.tasks import token_classification
from optimizer.harness.tasks.batch import Batch
from optimizer.load.datasets import Sample, check_disjoint, digest, labelled_as, samples
from optimizer.progress import bar, say
from optimizer.recipe import DataSpec, Validation
from optimizer.store import Estimate, Shapes, Stage
from optimizer.validate import gates as gating
from optimizer.validate import (
    generation_quality,
    generation_speed,
    ledger,
    on_gpu,
    quality,
    significance,
    speed,
    trace,
)
from optimizer.validate.gates import Gate
from optimizer.validate.hops import Entry
from optimizer.validate.materials import Materials
from optimizer.validate.quality import Answers

LEDGER_TEXTS = 32


def run(
    section: Validation,
    source: Path,
    state: Path,
    graph: Path,
    model: Path,
    engine: Path,
    *,
    out: Path,
) -> None:
    """Each folder is the stage's of that name (source: load, state: compress, graph: export,
    model: lower, engine: build). Raises DataError when the data sets overlap or lack what the
    metric needs."""
    data = _data(section)
    rows = data["validate.data"]
    held_out = ledger_texts(rows)
    materials = Materials(section, source, state, graph, model, engine, held_out)
    rows = labelled_as(rows, section.validate_.data, materials.contract.labels)
    with _one_torch_thread():
        machine = _machine()
        entries = ledger.run(materials)
    report: dict[str, Any] = {
        "target": f"{section.target.runtime}-{section.target.device}",
        "machine": machine,
        "ledger": [e.as_dict() for e in entries],
        "quality": None,
        "speed": None,
        "not_measured": {},
        "engine": {k: materials.inspected.get(k) for k in ("deferred", "why")},
        "modules": json.loads((state / "modules.json").read_text(encoding="utf-8")),
        "fallbacks": _fallbacks(materials),
    }
    gates = [_ledger_gate(entries)]
    elsewhere = on_gpu.not_here(materials)
    untimed = elsewhere or on_gpu.untimed(materials)
    target = section.target
    device = "cpu" if elsewhere else getattr(target, "runs_on", target.device)
    with _one_torch_thread():
        judged, report["quality"] = _quality(materials, rows, data.get("validate.train"), device)
    gates += judged
    if untimed:
        report["not_measured"] = {"speed": untimed}
        gates += speed.unmeasured(section.validate_.latency, untimed)
    if elsewhere:
        report["quality"]["note"] = (
            "answers of the lowered model, run by ONNX Runtime on the CPU; the engine computes the "
            "same function in its own kernels"
        )
    if not untimed:
        texts = [r.text for r in data.get("validate.latency.data", ())] or list(speed.NEUTRAL)
        timing = generation_speed if materials.task == "text-generation" else speed
        report["speed"] = timing.measure(materials, texts)
        inspected = materials.inspected.get("inspected") or {}
        gates += timing.gates(report["speed"], section.validate_.latency, inspected)
    report["verdict"] = gating.overall(gates)
    report["gates"] = [g.as_dict() for g in gates]
    text = json.dumps(_finite(report), indent=1, ensure_ascii=False, allow_nan=False)
    (out / "report.json").write_text(text, encoding="utf-8")
    for gate in gates:
        say(f"validate: {gate.verdict}: {gate.name}: {gate.message}")


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """The reference's bits do not depend on the number of cores; and small batches gain nothing
    from more threads, which wait for each other by spinning when the machine is busy (measured:
    18 times slower with two)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine() -> dict[str, Any]:
    machine = this_machine()
    return {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def specs(section: Validation) -> dict[str, DataSpec]:
    """The data sets of a section by their place in the recipe."""
    named = {
        "calibrate": section.calibrate.data if section.calibrate else None,
        "validate.data": section.validate_.data,
        "validate.train": section.validate_.train,
        "validate.latency.data": section.validate_.latency.data,
    }
    return {name: spec for name, spec in named.items() if spec is not None}


def _data(section: Validation) -> dict[str, list[Sample]]:
    """Every set's rows; those used for one purpose occur in no other."""
    rows = {name: samples(spec) for name, spec in specs(section).items()}
    if section.calibrate:
        wanted = section.calibrate
        windows = section.validate_.metric == "perplexity"  # cut from all texts joined
        limit = None if windows else wanted.samples
        rows["calibrate"] = samples(wanted.data, limit, wanted.seed)
    check_disjoint(rows)
    return rows


def ledger_texts(rows: Sequence[Sample]) -> list[str]:
    """LEDGER_TEXTS texts of all lengths, evenly through the rows sorted by length."""
    texts = sorted(dict.fromkeys(r.text for r in rows), key=len)
    if len(texts) < 3:
        raise DataError(
            f"{len(texts)} different texts",
            where="validate.data",
            accepted="three or more, so that padding and batches can be compared",
        )
    at = np.unique(np.linspace(0, len(texts) - 1, LEDGER_TEXTS).round().astype(int))
    return [texts[i] for i in at]


def _ledger_gate(entries: Sequence[Entry]) -> Gate:
    bad = next((e for e in entries if e.ok is False), None)
    if bad is None:
        ran = sum(e.ok is True for e in entries)
        skipped = [e.hop for e in entries if e.ok is None]
        message = f"{ran} hops within their limits"
        message += f"; not run here: {', '.join(skipped)}" if skipped else ""
        partly = [f"{e.hop}: {e.unproven}" for e in entries if e.ok and e.unproven]
        message += f"; in part only, {'; '.join(partly)}" if partly else ""
        return Gate("ledger", "pass", None, None, None, message)
    measured = bad.measured.worst if bad.measured else None
    message = f"hop {bad.hop}: {'; '.join(bad.problems[:3]) or 'out of tolerance'}"
    return Gate("ledger", "fail", measured, bad.tolerance, None, message)


def _fallbacks(m: Materials) -> list[dict[str, str]]:
    notes = [{"module": n.module, "what": n.what, "why": n.why} for n in m.state.notes]
    return notes + [
        {"module": name, "what": "wider", "why": "the engine runs it wider than asked"}
        for name in m.inspected.get("fallbacks") or []
    ]


def _quality(
    m: Materials, rows: Sequence[Sample], train: Sequence[Sample] | None, device: str
) -> tuple[list[Gate], dict[str, Any]]:
    """The quality gates and section: the source model and the candidate on the same rows."""
    if m.task == "text-generation":
        return generation_quality.quality(m, rows, device)
    wanted = m.section.validate_
    baseline = answer(m, _TorchRunner(m), rows, "validate: baseline")
    with closing(on_gpu.candidate(m, device)) as runner:
        candidate = answer(m, runner, rows, "validate: candidate")
    fit_on = None
    if wanted.metric == "probe_accuracy" and train is not None:
        fit_on = (train, answer(m, _TorchRunner(m), train, "validate: probe"))
    metric = quality.compare(wanted.metric, rows, baseline, candidate, fit_on, wanted.confidence)
    cosines = quality.cosines_of(baseline.text, candidate.text)
    decision, section = quality.judge(
        wanted.metric, metric, len(rows), wanted.max_drop, wanted.confidence, cosines
    )
    made = [gating.from_decision(f"quality.{wanted.metric}", decision, wanted.metric)]
    if wanted.min_cosine is not None:
        away = 1 - cosines
        decided = significance.resampled(
            lambda w: w @ away / w.sum(1), len(rows), 1 - wanted.min_cosine, wanted.confidence
        )
        made.append(_cosine_gate(decided))
    return made, section


def _cosine_gate(decided: significance.Decision) -> Gate:
    low, high = decided.interval
    mean = 1 - decided.drop
    message = f"mean cosine to float is {mean:.5f} on {decided.examples} examples"
    message += gating.reached(decided)
    if decided.verdict == "inconclusive":
        message += f"; about {decided.needed} examples would decide" if decided.needed else ""
    return Gate(
        "quality.min_cosine",
        decided.verdict,
        mean,
        1 - decided.margin,
        (1 - high, 1 - low),
        message,
    )


class _TorchRunner:
    """The source model with a runner's face."""

    def __init__(self, m: Materials) -> None:
        self._m = m

    def infer(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        return trace.run(self._m.float_model, arrays, self._m.outputs)


def answer(m: Materials, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    """A system's answers to rows, in their order, through the harness.

    Texts of like length share a batch, so that little is padding; which do changes an answer by
    float rounding only.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].text) + len(rows[i].text_pair or ""))
    found = _answer(m, runner, [rows[i] for i in order], label)
    place = {row: i for i, row in enumerate(order)}

    def back(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[place[i]] for i in range(len(rows)))

    return Answers(back(found.text) or (), back(found.pair), back(found.words))


def _answer(m: Materials, runner: Any, rows: Sequence[Sample], label: str) -> Answers:
    size = m.section.validate_.batch_size
    together = m.task == "text-classification"
    text: list[Any] = []
    pair: list[Any] = []
    words: list[Any] = []
    pairs = [r.text_pair for r in rows]
    for start in bar(range(0, len(rows), size), label):
        part = rows[start : start + size]
        second = [r.text_pair for r in part] if together and any(pairs) else None
        batch, values = _values(m, runner, [r.text for r in part], second)
        text += _vectors(values, batch)
        if m.task == "token-classification" and all(r.words is not None for r in rows):
            words += [_tags(m, r, batch, values, i) for i, r in enumerate(part)]
        if not together and all(p is not None for p in pairs):
            other, values = _values(m, runner, [str(r.text_pair) for r in part], None)
            pair += _vectors(values, other)
    return Answers(tuple(text), tuple(pair) or None, tuple(words) or None)


def _values(
    m: Materials, runner: Any, texts: Sequence[str], pairs: Sequence[str | None] | None
) -> tuple[Batch, Any]:
    batch = tasks.encode(m.contract, m.tokenizer, texts, pairs)
    return batch, tasks.decode(m.contract, runner.infer(batch), batch)


def _vectors(values: Any, batch: Batch) -> list[Any]:
    """One flat vector per text; of values per token, the real tokens'."""
    if values.ndim == 2:
        return list(values)
    mask = batch["attention_mask"].astype(bool)
    return [row[keep].ravel() for row, keep in zip(values, mask, strict=True)]


def _tags(m: Materials, row: Sample, batch: Batch, values: Any, i: int) -> Any:
    """The label id of each word of a sample: its first token's; -1 when it was cut off."""
    found = token_classification.words(m.contract, row.text, batch.encodings[i], values[i])
    names = list(m.contract.labels or ())
    by_start = {w["start"]: names.index(w["label"]) for w in found}
    ids, start = [], 0
    for word in row.words or ():
        ids.append(by_start.get(start, -1))
        start += len(word) + 1
    return np.array(ids)


def _finite(value: Any) -> Any:
    """JSON has no infinity: a number that is not finite becomes null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def files(section: Validation) -> Mapping[str, str]:
    """The digest of every data set, and the machine: its timings are no other machine's."""
    machine = this_machine()
    return {
        **{name: digest(spec) for name, spec in specs(section).items()},
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.gpu}",
    }


def estimate(section: Validation, shapes: Shapes) -> Estimate:
    """Three models in memory at once; time is dominated by evaluation and timing."""
    elements = sum(math.prod(s) for s in shapes.values())
    if section.validate_.metric == "perplexity":
        return _writing(section, shapes, elements)
    rows = section.validate_.data.samples or 1000
    cells = len(section.validate_.latency.batch) * len(section.validate_.latency.sequence)
    rounds = cells * section.validate_.latency.iterations
    per_text = 2e-9 * elements
    return Estimate(
        memory=(700 << 20) + 20 * elements,
        disk=1 << 20,
        seconds=10 + per_text * (2 * rows + 12 * rounds),
    )


def _writing(section: Validation, shapes: Shapes, elements: int) -> Estimate:
    """Of text-generation: about a hundred windows through both models, with the logits of one in
    memory for each, and then one token after the other."""
    wanted = section.validate_
    latency, vocabulary = wanted.latency, max((max(s) for s in shapes.values()), default=0)
    logits = 2 * 4 * wanted.sequence_length * vocabulary
    rounds = len(latency.batch) * len(latency.sequence) * latency.iterations
    tokens = sum(latency.sequence) / len(latency.sequence) + 10 * latency.new_tokens
    judged = 2 * 100 * wanted.sequence_length
    return Estimate(
        memory=(900 << 20) + 12 * elements + logits,
        disk=1 << 20,
        seconds=30 + 7e-11 * elements * (judged + 2 * rounds * tokens),
    )


STAGE = Stage(
    "validate",
    1,
    run,
    packages=(
        "torch",
        "transformers",
        "tokenizers",
        "onnxruntime",
        "onnxruntime-gpu",
        "numpy",
        "cuda-bindings",
    ),
    files=files,
    measured=True,
    estimate=estimate,
)
