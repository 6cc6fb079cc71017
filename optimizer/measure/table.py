"""Measure a bundle's times on this machine; write and read them as a table, with its signature.

table.json, version 1:
    version, seconds        1, and the time that it took
    bundle                  {name, version, content_digest} of what was measured
    engine, device, threads of the bundle's engine that fits this machine
    machine                 processor, memory, packages: harness/runtimes/machine.py
    busy                    other work of the machine at the start; "" without
    cells                   [{batch, sequence, runs, p50, p50_interval, p99, p99_interval: ms end to
                            end, forward_p50: of them in the model, answers_per_second,
                            joules_per_answer, cost_per_million}]
    energy                  why counters are not read; "" where all are
    energy_of               names of the counters that are read: packages, the GPU
    modules                 module_times.py, of the first batch with the longest sequence; null for
                            other runtimes than ONNX Runtime
    rates                   of the processor, for the roofline (roofline.py); null without
    price_per_hour          or null; cost_per_million: {answers, tokens where inputs have some} from
                            it, or null

table.json.sig is the signature of harness/trust/signature.py with the table as its only file.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation import atomic
from optimizer.foundation.errors import DataError, InputError
from optimizer.foundation.process import busy
from optimizer.foundation.progress import say
from optimizer.harness.bounds import check_grid
from optimizer.harness.bundle import bench
from optimizer.harness.bundle.bench import System
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import BundleError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.trust import signature
from optimizer.measure import module_times, roofline
from optimizer.measure.energy import Meter
from optimizer.measure.roofline import MachineRates
from optimizer.publish.documents import sign
from optimizer.store import digest_file
from optimizer.timing.stopping_rules import PrecisionRule

VERSION = 1
SHORTEST, LONGEST = 8, 512  # tokens of the default lengths, doubled from one to the next
ITERATIONS, WARMUP = 10, 5  # rounds, at least; a choice, as are the lengths above
PRECISION = 0.01  # half the width of a median's interval / the median; a cell ends there; a choice
SYSTEM = "candidate"
FIGURES = ("p50", "p50_interval", "p99", "p99_interval")


def lengths(max_length: int) -> list[int]:
    """List the default lengths, in tokens, that `optimize measure` times, for a model of at most
    `max_length` tokens."""
    doubled = [SHORTEST << i for i in range(7) if SHORTEST << i <= LONGEST]
    return [n for n in doubled if n < max_length] + [min(max_length, LONGEST)] * (
        max_length <= LONGEST
    )


def measure(
    bundle: Bundle,
    batches: Sequence[int],
    sequences: Sequence[int],
    seconds: float,
    price: float | None,
) -> dict[str, Any]:
    """Measure the table of a bundle on this machine.

    batches: rows per batch to time
    sequences: tokens per row to time; (): those of `lengths`
    seconds: time of all cells together, approximately
    price: price of this machine per hour; None: no costs

    Raises InputError for text generation, and for lengths beyond the model's.
    """
    if bundle.task.generates:
        raise InputError(
            "the bundle generates text, whose time is not that of one run",
            where="optimize measure",
            accepted="bundles of other tasks",
            fix="optimize bench BUNDLE times text generation.",
        )
    sized = bool(bundle.task.inputs.size)
    chosen = list(sequences or lengths(bundle.max_length)) if sized else [1]
    check_grid(max(batches), max(chosen))
    if max(chosen) > bundle.max_length:
        raise InputError(
            f"{max(chosen)} tokens", where="--sequence", accepted=f"up to {bundle.max_length}"
        )
    texts, system = bundle.task.inputs.neutral(bundle.contract), bundle.system()
    grid = [(batch, sequence) for batch in batches for sequence in chosen]
    gpu = bundle.engine["device"] != "cpu"
    document = measure_system(system, texts, grid, bundle.threads, seconds, price, gpu=gpu)
    for cell in document["cells"]:
        if cell["cost_per_million"] and not sized:
            del cell["cost_per_million"]["tokens"]
    if isinstance(bundle.runner, OrtRunner):
        batch, sequence = batches[0], max(chosen)
        arrays = build_arrays(system, texts, (batch, sequence))
        rates = measure_rates(bundle.runner)
        document["rates"] = rates and rates.to_json()
        document["modules"] = module_times.measure(bundle.runner, arrays, rates)
        document["modules"] |= {"batch": batch, "sequence": sequence}
    manifest = bundle.manifest
    named = {name: manifest[name] for name in ("name", "version", "content_digest")}
    engine = {name: bundle.engine[field] for name, field in (("engine", "target"), ("device",) * 2)}
    return {**document, "bundle": named, **engine}


def measure_rates(runner: OrtRunner) -> MachineRates | None:
    """Measure the roofline of a runner's processor with its threads; None on another device."""
    if runner.provider != "cpu":
        return None
    say("measure: measuring the peak rates of this processor")
    return roofline.measure(runner.threads)


def build_arrays(system: System, texts: Sequence[Any], cell: tuple[int, int]) -> dict[str, Any]:
    """Encode a batch of equal rows, to time an engine. cell: (batch, sequence)"""
    batch, sequence = cell
    return dict(system.pre([system.lengthen([*texts], sequence)] * batch, sequence))


def measure_system(
    system: System,
    texts: Sequence[Any],
    grid: Sequence[tuple[int, int]],
    threads: int,
    seconds: float,
    price: float | None,
    *,
    gpu: bool = False,
) -> dict[str, Any]:
    """Measure an engine: the parts of its table that do not depend on a bundle.

    texts: inputs, joined to rows of each length
    grid: (batch, sequence) of each cell
    threads: threads of a run
    seconds: time of all cells together, approximately
    price: price of this machine per hour; None: no costs
    gpu: True if the model runs on a GPU
    """
    started, meter, at_start = time.monotonic(), Meter(gpu=gpu), busy.describe()
    cells = []
    for number, cell in enumerate(grid, 1):
        cells.append(_cell(system, cell, texts, seconds / len(grid), meter, price))
        shape = f"batch {cell[0]} x {cell[1]}"
        say(f"measure: {number} of {len(grid)}: {shape}: {cells[-1]['p50']:.3g} ms")
    return {
        "version": VERSION,
        "seconds": time.monotonic() - started,
        "threads": threads,
        "machine": describe_machine().to_json(),
        "busy": at_start,
        "cells": cells,
        "energy": meter.missing,
        "energy_of": meter.devices,
        "modules": None,
        "rates": None,
        "price_per_hour": price,
    }


def _cell(
    system: System,
    cell: tuple[int, int],
    texts: Sequence[Any],
    seconds: float,
    meter: Meter,
    price: float | None,
) -> dict[str, Any]:
    """Time an engine with one shape, and return its entry in the table.

    cell: (batch, sequence)
    seconds: time limit
    meter: energy meter
    price: price of this machine per hour; None: no cost
    """
    rule = PrecisionRule(PRECISION, seconds)
    meter.start()
    measured = bench.measure(
        {SYSTEM: system},
        [cell],
        texts,
        iterations=ITERATIONS,
        warmup=WARMUP,
        more=lambda times: rule.more(times[SYSTEM]),
    )
    joules = meter.joules()
    (timed,) = measured["cells"]
    figures, (batch, sequence) = timed["systems"][SYSTEM], cell
    rate = figures["throughput"]
    cost = None if price is None else price / 3600 / rate * 1e6
    return {
        "batch": batch,
        "sequence": sequence,
        "runs": timed["runs"],
        **{name: figures["end_to_end"][name] for name in FIGURES},
        "forward_p50": figures["stages"]["forward"]["p50"],
        "answers_per_second": rate,
        "joules_per_answer": joules and joules / (batch * (timed["runs"] + WARMUP)),
        "cost_per_million": cost and {"answers": cost, "tokens": cost / sequence},
    }


def write(document: Mapping[str, Any], out: Path, key: Path | None) -> None:
    """Write a bundle's measured table of times, and its signature where a private key is given;
    without a key a signature of an earlier table is removed."""
    private_key = None if key is None else sign.load_private(key)
    with atomic.explain_disk_errors(out, "--out"):
        atomic.write(out, json.dumps(document, indent=1).encode() + b"\n")
        if private_key is None:
            signature.signature_path(out).unlink(missing_ok=True)
            return
        statement = sign.compose_statement(out.name, {out.name: digest_file(out)})
        atomic.write(signature.signature_path(out), sign.sign_statement(statement, private_key))


def read(file: Path, key: Path | None = None) -> dict[str, Any]:
    """Read a signed table of a bundle's measured times and energy.

    key: public key; None: no signature is required

    Raises DataError for a file that is not such a table, BundleError for a table without a
    signature by this key.
    """
    try:
        document = json.loads(file.read_text("utf-8"))
        if document["version"] != VERSION or not document["cells"]:
            raise ValueError(f"version {document['version']}")
        for number, cell in enumerate(document["cells"]):
            for name in ("batch", "sequence", "p50", "forward_p50"):
                _check(cell[name], f"cells[{number}].{name}", whole=name in ("batch", "sequence"))
    except (OSError, ValueError, LookupError, TypeError) as e:
        raise DataError(
            f"cannot be read ({e})", where=str(file), accepted="a table of `optimize measure`"
        ) from None
    if document.get("busy"):
        say(f"warning: {file} was measured beside other work: {document['busy']}")
    if key is not None:
        beside = signature.signature_path(file)
        if not beside.is_file():
            raise BundleError("the table has no signature", where=str(beside))
        public_key = signature.load_public(key)
        signed = signature.verify_signed_files(beside.read_bytes(), public_key, str(beside))
        if signed != {file.name: digest_file(file)}:
            raise BundleError("the table is not the one that was signed", where=str(file))
    return dict(document)


def _check(value: Any, name: str, whole: bool) -> None:
    """Raise ValueError for a value of a measured table that is not a finite number above 0.

    whole: True for whole numbers only
    """
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
        raise ValueError(f"{name} is {value!r:.40}, not a {'whole ' * whole}number above 0")


def format_table(document: Mapping[str, Any]) -> str:
    """Format a measured table of a bundle for a terminal."""
    energy, price = document["energy"], document["price_per_hour"]
    heads = ["batch", "tokens", "p50 ms", "p99 ms", "answers/s"]
    measured = document["cells"][0]["joules_per_answer"] is not None
    heads += ["J/answer"] * measured
    heads += [] if price is None else ["cost of a million"]
    rows = [heads, *(_row(cell, measured, price) for cell in document["cells"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(c.rjust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
    machine, threads = document["machine"], document["threads"]
    lines.insert(
        0, f"{document['engine']} on {machine['cpu']}, {threads or machine['cores']} threads"
    )
    lines += [f"Energy of {', '.join(document['energy_of'])}."] * measured
    lines.append("" if not energy else f"Energy is not measured: {energy}.")
    modules = document["modules"]
    if modules is None:
        return "\n".join([*lines, "Modules are timed with ONNX Runtime alone."])
    lines += ["Time by module:", *map(_module_line, modules["modules"][:10])]
    if document["rates"] is not None:
        lines += roofline.format_rates(document["rates"])
    return "\n".join(lines)


def _module_line(one: Mapping[str, Any]) -> str:
    attained = one.get("attained")
    of = "" if "attained" not in one else " " * 9 if attained is None else f"  {attained:7.1%}"
    return f"  {one['share']:6.1%}  {one['ms']:8.3f} ms{of}  {one['module'] or 'no module'}"


def _row(cell: Mapping[str, Any], energy: bool, price: float | None) -> list[str]:
    high = cell["p99_interval"][1]
    row = [
        str(cell["batch"]),
        str(cell["sequence"]),
        f"{cell['p50']:.3f}",
        f"{cell['p99']:.3f}" if high is not None else f"{cell['p99']:.3f}?",
        f"{cell['answers_per_second']:.1f}",
    ]
    row += [] if not energy else [f"{cell['joules_per_answer']:.4g}"]
    return row + ([] if price is None else [f"{cell['cost_per_million']['answers']:.4g}"])
