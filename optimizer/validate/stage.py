"""Stage `validate`: judge one target's built model by the ledger, the quality gates and the speed
gates.

Writes report.json:
    target        "onnxruntime-cpu"
    machine       {cpu, cores, torch_capability, threads} of the ledger's run; torch_capability:
                  torch's kernels ("AVX512"); threads: torch's
    verdict       the worst gate's: pass | fail | inconclusive
    gates         [{name, verdict, measured, limit, interval, message}]
    sense         plausibility of inputs and reference, see sense.py
    shared_rows   {learning set: {evaluation set: rows in both}}, see quality/shared_rows.py
    judged        digests that a bundle of this target must match, see judged.py
    ledger        [{hop, from, tolerance, measured, ok, why, problems, unproven, pieces, spread}],
                  see entry.Entry; ok null: not run here, why; shown by `optimize explain`
    nodes         of a model that is an ONNX file, the distance of each node from the file:
                  ledger/onnx_file/nodes.py; else null
    reduced       {importance, methods, sizes, weights, left_out, compared} of reduced.json, and
                  `student`, the source of a student; null without one
    latencies     {goal, least, cell, unreduced, entries, confirmed, candidates, ...}: the table of
                  timed sizes (reduce/structure/latency_table.py); null without one
    calibration   {read, expected}: rows, tokens and digest of the calibration data that compress
                  read, and that the recipe describes; null where there is none (token_counts.py)
    learned       [{hop, steps, stopped, held_out, train, start, end}] of recovered.json and
                  trained.json; empty without them
    quality       see quality/quality.py, for text-generation quality/perplexity.py; with a note
                  where a stand-in for the target's runtime answered
    adapters      {name: `quality` with that adapter, `data`: path in the recipe of its rows, and
                  `reference` as in `sense`}; {} without adapters
    also          {name: `quality` on each further set, and report_only: true without a gate}
    speed         see timing/; null when this machine cannot run the engine
    not_measured  {section: why} for each part this machine could not carry out
    engine        {deferred, why} when the engine is not built here
    modules       the compress stage's row per module
    fallbacks     {module, what, why} of modules in higher precision or float, then notes of the
                  lowering, one sentence each
A gate that does not pass raises nothing: it is in the report, and decides the exit code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from optimizer import targets
from optimizer.data.datasets import Sample, digest_rows, pick_input
from optimizer.foundation.atomic import remove
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.recipe.compression import methods
from optimizer.recipe.schema import Validation
from optimizer.reduce.learn.distill import draw_texts
from optimizer.reduce.structure import latency_table
from optimizer.store import Artifacts, Reference, Stage
from optimizer.targets import missing_packages
from optimizer.validate import adapters, judged, reference_device, sense, target_runner
from optimizer.validate import gates as gating
from optimizer.validate.data import check_windows, list_specs, read_data
from optimizer.validate.estimate import estimate
from optimizer.validate.gates import Gate
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.ledger.inputs import select_inputs
from optimizer.validate.ledger.laws.reduce import structure_laws, training_laws
from optimizer.validate.ledger.onnx_file import nodes
from optimizer.validate.materials import Materials
from optimizer.validate.quality import (
    answers,
    evaluation,
    generation_quality,
    quality,
    shared_rows,
    significance,
    widths,
)
from optimizer.validate.quality.engine_rows import EngineRows
from optimizer.validate.quality.evaluation import FIRST, Judged, Rows
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.search import stage as search_stage
from optimizer.validate.timing import batch_timing, float_baselines, generation_timing, latency_gain
from optimizer.validate.timing.speed_gates import count_questions, list_unmeasured

ELSEWHERE = (
    "answers of the lowered model in ONNX Runtime on the CPU; the engine computes the same "
    "function in its own kernels"
)
RECOVER = "add reduce.recover, which trains the smaller model on the reference's outputs"


def run(
    section: Validation,
    artifacts: Artifacts[Path],
    original: Reference[Path] | None = None,
    beside: Artifacts[Path] | None = None,
    *,
    out: Path,
) -> None:
    """Judge the artifacts of a target and write report.json into `out`.

    Raises DataError when the data sets overlap or lack a column that the metric needs, and
    MachineError when a package that judges the target is not installed (unless on_missing: defer).
    original: the reference, where `artifacts.base` is another model
    beside: artifacts of the side of texts, for a model that embeds images and texts"""
    missing_packages.check_target(section.target, f"target {section.target.name}")
    contract = contracts.read(artifacts.base / "contract.json")
    task = tasks.look_up(contract)
    data = read_data(section, artifacts.base, contract)
    inputs = select_inputs(data["validate.data"], task)
    clear(out)
    materials = _materials(section, artifacts, original, beside, inputs, out)
    sets = evaluation.read_sets(section.validate_, data, contract)
    reference_device.check(materials)
    with use_one_torch_thread(), reference_device.use_device(materials):
        machine = _machine()
        rows = sets[FIRST]
        shared = shared_rows.count(data, contract, materials.encoder)
        reference = answers.answer_by_reference(materials, rows, data.get("validate.train"))
        sensed = sense.check_reference(materials, data, rows, reference)
        entries = ledger.run(materials, make_hops_folder(out))
    report: dict[str, Any] = {
        "target": section.target.name,
        "machine": machine,
        "sense": sensed,
        "shared_rows": shared,
        "reduced": structure_laws.collect_figures(materials),
        "latencies": latency_gain.read_table(materials),
        "calibration": _calibration(materials),
        "learned": training_laws.collect_figures(materials),
        "nodes": nodes.measure(materials),
        "quality": None,
        "also": {},
        "speed": None,
        "not_measured": {},
        "engine": {k: materials.inspected.get(k) for k in ("deferred", "why")},
        "modules": json.loads((materials.state_folder / "modules.json").read_text("utf-8")),
        "fallbacks": _fallbacks(materials),
    }
    elsewhere = target_runner.explain_not_run(materials)
    seen = EngineRows(materials, "cpu" if elsewhere else section.target.runs_on)
    with reference_device.use_device(materials):
        gates = _judge_quality(materials, sets, reference, report, seen)
    if report["quality"] is not None:
        entries.append(seen.entry())
    with reference_device.use_device(materials), use_one_torch_thread():
        gates += adapters.judge(materials, data, seen.device, entries, report)
    gates.insert(0, _ledger_gate(entries))
    with reference_device.use_device(materials):
        gates += search_stage.judge(materials, data, seen.device, report, out)
    report["ledger"] = [e.as_dict() for e in entries]
    report["judged"] = judged.record(materials, rows, seen.answered_by, out)
    if untimed := elsewhere or target_runner.explain_not_timed(materials):
        report["not_measured"]["speed"] = untimed
        report["size"] = target_runner.measure_files(materials)
        gates += list_unmeasured(
            section.validate_.latency, untimed, latency_gain.declare_gate(materials)
        )
    else:
        floats = _judge_float_baselines(materials, rows, reference)
        timed = data.get("validate.latency.data", ())
        report["speed"], speed_gates = _judge_speed(materials, timed, floats)
        gates += speed_gates
    report["verdict"] = gating.judge_overall(gates)
    report["gates"] = [g.as_dict() for g in gates]
    text = json.dumps(_finite(report), indent=1, ensure_ascii=False, allow_nan=False)
    (out / "report.json").write_text(text, encoding="utf-8")
    remove(make_hops_folder(out))
    for gate in gates:
        say(f"validate: {gate.verdict}: {gate.name}: {gate.message}")


def make_hops_folder(out: Path) -> Path:
    """Return the folder that keeps the hops that passed, for a later run with the same instruction
    set of torch's kernels, such as AVX512."""
    return out / f"passed-hops-{torch.backends.cpu.get_cpu_capability()}"


def clear(out: Path) -> None:
    """Remove all that a killed run of validate left in `out`, except the hops that passed."""
    kept = make_hops_folder(out)
    for path in [*out.iterdir()]:
        if path != kept:
            remove(path)
    kept.mkdir(exist_ok=True)


def _materials(
    section: Validation,
    artifacts: Artifacts[Path],
    original: Reference[Path] | None,
    beside: Artifacts[Path] | None,
    texts: Sequence[Any],
    scratch: Path,
) -> Materials:
    materials = Materials(
        *(
            section,
            artifacts.base,
            artifacts.state,
            artifacts.graph,
            artifacts.model,
            artifacts.engine,
        ),
        texts=texts,
        scratch=scratch,
    )
    if beside is not None and section.texts is not None:
        materials.texts_beside = RunArtifacts(section.texts, *astuple(beside))
    if original is None:
        return materials
    timed = original.latencies
    return replace(
        materials,
        original=original.checkpoint,
        original_graph=original.graph,
        smaller=original.smaller,
        untrained=original.untrained,
        unreduced=timed / latency_table.UNREDUCED if timed else None,
    )


def _judge_quality(
    m: Materials,
    sets: Rows,
    reference: answers.Reference | None,
    report: dict[str, Any],
    seen: EngineRows,
) -> list[Gate]:
    """Return the quality gates, and fill in `seen` and the report's sections of quality."""
    if unanswered := target_runner.explain_not_answered(m):
        report["not_measured"]["quality"] = unanswered
        name = f"quality.{m.section.validate_.metric}"
        return [Gate(name, "inconclusive", None, None, None, unanswered)]
    with use_one_torch_thread():
        compared = _compare_sets(m, sets, reference, seen)
    gates, report["quality"], report["also"] = evaluation.gather(m.section.validate_, compared)
    if m.section.reduce and not m.section.recovery:
        gates = [gating.add_advice(g, RECOVER) for g in gates]
    report["sense"] |= sense.check_comparison(m, compared[FIRST][0], report["quality"])
    if (
        note := ELSEWHERE
        if target_runner.explain_not_run(m)
        else targets.look_up(m.section.target.runtime).answered_by
    ):
        for judged_on in (report["quality"], *report["also"].values()):
            judged_on["note"] = note
    return gates


def _judge_float_baselines(
    m: Materials, rows: Sequence[Sample], reference: answers.Reference | None
) -> float_baselines.FloatBaselines | None:
    """Judge the float baselines that must_beat_float compares with; None without that gate."""
    if not m.section.validate_.latency.must_beat_float:
        return None
    with use_one_torch_thread():
        if reference is None:
            return float_baselines.judge_baselines_on_windows(m, rows)
        return float_baselines.judge_baselines(
            m,
            rows,
            reference,
            lambda base, other: compare(m, rows, (base[0], other), base[1], None),
        )


def _judge_speed(
    m: RunArtifacts, rows: Sequence[Sample], floats: float_baselines.FloatBaselines | None
) -> tuple[dict[str, Any], list[Gate]]:
    """Time the target and return (the report's `speed` section, its gates).

    rows: timed inputs; empty: neutral inputs
    """
    task, latency = tasks.look_up(m.contract), m.section.validate_.latency
    texts = [pick_input(r, task) for r in rows] or task.inputs.neutral(m.contract)
    timing = generation_timing if task.generates else batch_timing
    section = timing.measure(m, texts, floats)
    shared = count_questions(latency, len(section["cells"]), m.gains)
    if m.gains:
        section["gain"] = latency_gain.measure(m, texts, shared)
    gates = timing.judge(section, latency, m.inspected.get("inspected") or {})
    return section, gates + ([latency_gain.judge(section["gain"], shared)] if m.gains else [])


@contextmanager
def use_one_torch_thread() -> Iterator[None]:
    """Run torch on one thread while a target is judged, so that the reference's bits do not depend
    on the number of cores. Small batches gain nothing from more (docs/decisions/0019)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _machine() -> dict[str, Any]:
    machine = describe_machine()
    return {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _calibration(m: Materials) -> dict[str, Any]:
    read, expected = m.calibration_counts
    if read is not None:
        say(f"validate: calibration read {read}; the recipe describes {expected}")
    counted = {"read": read, "expected": expected}
    return {name: None if c is None else c.as_dict() for name, c in counted.items()}


def _ledger_gate(entries: Sequence[LedgerEntry]) -> Gate:
    bad = next((e for e in entries if e.ok is False), None)
    if bad is None:
        skipped = [e.hop for e in entries if e.ok is None]
        message = f"{sum(e.ok is True for e in entries)} hops within their limits"
        message += f"; not run here: {', '.join(skipped)}" if skipped else ""
        shortened = [e for e in entries if e.ok and e.unproven]
        hops = {e.partly: [o.hop for o in shortened if o.partly == e.partly] for e in shortened}
        partly = [f"{', '.join(names)}: {words}" for words, names in hops.items()]
        message += f"; in part only, {'; '.join(partly)}" if partly else ""
        return Gate("ledger", "pass", None, None, None, message)
    message = f"hop {bad.hop}: {'; '.join(bad.problems[:3]) or 'beyond its limit'}"
    return Gate("ledger", "fail", bad.reached, bad.tolerance, None, message)


def _fallbacks(m: Materials) -> list[dict[str, str] | str]:
    return [
        *({"module": n.module, "what": n.what, "why": n.why} for n in m.state.notes),
        *(
            {"module": name, "what": "higher precision", "why": "the engine runs it so"}
            for name in m.inspected.get("fallbacks") or []
        ),
        *m.lowering.get("notes", ()),
    ]


def check_inputs(section: Validation, source: Path) -> None:
    """Raise the DataError that `run` would raise for texts and labels, before anything is
    compressed, and print warnings about them."""
    contract = contracts.read(source / "contract.json")
    data = read_data(section, source, contract)
    encoder = tasks.look_up(contract).inputs.open(source / "checkpoint", contract)
    shared_rows.count(data, contract, encoder)
    evaluation.check(section.validate_, data, contract)
    check_windows(section, data, contract, encoder)
    if tasks.look_up(contract).in_parts:
        answers.encode_parts(contract, encoder, data["validate.data"])
    search_stage.read(section, source, contract, data)
    if section.recovery:
        draw_texts(section.recovery.recover, section.recovery.data, contract, source / "checkpoint")
    if section.training:
        draw_texts(section.training.qat, section.training.data, contract, source / "checkpoint")
    for measured in sense.measure_inputs(section, source, data)[f"{contract.input_kind}s"].values():
        sense.print_warnings(measured["warnings"])


def _compare_sets(
    m: Materials, sets: Rows, reference: answers.Reference | None, seen: EngineRows
) -> Judged:
    """Compare the reference model and the candidate on each set: {name of the set: (its quality
    gates, its section of the report)}."""
    if reference is None:
        return generation_quality.judge_generation(m, sets, seen)
    baseline, fit_on = reference
    compared, train_answers, answered = {}, None, {}
    with closing(target_runner.open_candidate(m, seen.device)) as runner:
        seen.check_files(runner)
        if fit_on is not None and widths.differ(m):
            train_answers = answers.answer(m, runner, fit_on[0], "validate: candidate's probe")
        for name, rows in sets.items():
            on = f" on {name}" if name else ""
            if name != FIRST:
                baseline = answers.answer(
                    m, answers.TorchRunner(m), rows, f"validate: baseline{on}"
                )
            candidate = answers.answer(m, runner, rows, f"validate: candidate{on}")
            answered[name] = rows, baseline, candidate
            compared[name] = compare(m, rows, (baseline, candidate), fit_on, train_answers)
            if labels := answers.count_labels(m.contract, candidate):
                compared[name][1]["labels"] = labels
    seen.check_answers(answered)
    return compared


def compare(
    m: RunArtifacts,
    rows: Sequence[Sample],
    systems: tuple[Answers, Answers],
    fit_on: answers.Train | None,
    train_answers: Answers | None,
) -> tuple[list[Gate], dict[str, Any]]:
    """Judge two systems' answers to one set: (quality gates, section of the report).

    systems: answers of baseline and candidate
    fit_on: the probe's rows and the baseline's answers to them
    train_answers: the candidate's answers to these rows, where each system has its own probe
    """
    settings = m.section.validate_
    if fit_on is not None and train_answers is not None:
        metric = widths.compare_probes(rows, systems, fit_on[0], (fit_on[1], train_answers))
    else:
        metric = quality.compare(settings.metric, rows, *systems, fit_on, settings.confidence)
    cosines = None if widths.differ(m) else quality.compare_by_cosine(*systems)
    cosines = (
        None if tasks.look_up(m.contract).fills else cosines
    )  # of log-probabilities says nothing
    one_number = all(text.size == 1 for text in systems[0].text)  # its cosine is 1 or -1
    decision, section = quality.judge(
        settings.metric,
        metric,
        len(rows),
        settings.max_drop,
        settings.confidence,
        None if one_number else cosines,
    )
    gates = [gating.make_gate(f"quality.{settings.metric}", decision, settings.metric)]
    if settings.min_cosine is not None and cosines is not None:
        away = 1 - cosines
        decided = significance.decide_by_bootstrap(
            lambda w: w @ away / w.sum(1), len(rows), 1 - settings.min_cosine, settings.confidence
        )
        gates.append(_cosine_gate(decided))
    return gates, section


def _cosine_gate(decided: significance.Decision) -> Gate:
    low, high = decided.interval
    mean = 1 - decided.drop
    message = f"mean cosine to float is {mean:.5f} on {decided.examples} examples"
    message += gating.describe_miss(decided)
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


def _finite(value: Any) -> Any:
    """Replace NaN and infinity in the report, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def files(section: Validation) -> Mapping[str, str]:
    """Digests of every data set, of the code of the methods that the ledger runs again and of the
    code that opens and judges the target, and the machine: its times are valid on no other one."""
    return {
        **targets.look_up(section.target.runtime).code("open", "hops"),
        **(targets.look_up(section.texts.target.runtime).code("open") if section.texts else {}),
        **{name: digest_rows(spec) for name, spec in list_specs(section).items()},
        **search_stage.digest_sets(section),
        **methods.digest_code(section.quantize.in_use, limits=True),
        "machine": describe_machine().key,
    }


STAGE = Stage(
    "validate",
    1,
    run,
    packages=(
        "torch",
        "transformers",
        "peft",
        "tokenizers",
        "onnxruntime",
        "onnxruntime-gpu",
        "numpy",
        "cuda-bindings",
    ),
    files=files,
    measured=True,
    estimate=estimate,
    resumable=True,
)
