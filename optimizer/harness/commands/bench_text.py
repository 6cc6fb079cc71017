"""Render the document of `bench` for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..bundle.bench import PERCENTILES

WIDTH = 23


def bench_text(document: dict[str, Any]) -> str:
    """Format for `harness bench` the document of bench.measure as text: a block per cell, at most
    110 columns wide."""
    inputs = document["inputs"]
    lines = list[str]()
    for cell in document["cells"]:
        system = cell["systems"]["candidate"]
        lines += [
            "",
            f"batch {cell['batch']}{_size(cell, inputs)}, {cell['runs']} rounds, "
            f"{system['throughput']:.1f} {inputs['noun']}s/s",
            f"  {'':<12}" + "".join(f" {f'p{p}':>{WIDTH}}" for p in PERCENTILES),
            _row("end to end", system["end_to_end"]),
            *(_row(f"  {name}", figures) for name, figures in system["stages"].items()),
            f"  {_recorded(cell, document['recorded'])}",
        ]
    return _framed(document, lines)


def _framed(document: dict[str, Any], lines: list[str]) -> str:
    """Put the text of `harness bench` together: the machine, the lines of all cells, then memory
    and size."""
    memory, size = document["peak_memory"]["candidate"], document["size"]["candidate_bytes"]
    return "\n".join(
        (
            f"{document['engine']} on {name_processor(document)}",
            "times in ms, with 95 % intervals; ? = too few rounds to bound it",
            *lines,
            "",
            f"peak memory {memory / 2**20:.0f} MiB, model {size / 2**20:.1f} MiB",
        )
    )


def name_processor(document: Mapping[str, Any]) -> str:
    """Return for `harness bench` the name of the GPU with its driver, or of the CPU with its
    threads.

    document: result of `bench`
    """
    machine = document["machine"]
    if document["device"] != "cpu" and machine["gpu"] is not None:
        return f"{machine['gpu']['name']}, driver {machine['gpu']['driver']}"
    return f"{machine['cpu']}, {document['threads'] or machine['cores']} threads"


def _size(cell: dict[str, Any], inputs: dict[str, Any]) -> str:
    """Return the size of a cell's inputs in words, for the text of `harness bench`; "" if all
    inputs have one size."""
    return f" x {cell['sequence']} {inputs['size']}" if inputs["size"] else ""


def _row(name: str, figures: dict[str, Any]) -> str:
    values = [f"{figures[f'p{p}']:.2f} {_interval(figures[f'p{p}_interval'])}" for p in PERCENTILES]
    return f"  {name:<12}" + "".join(f" {v:>{WIDTH}}" for v in values)


def _interval(ends: Sequence[float | None]) -> str:
    low, high = ("?" if e is None else f"{e:.2f}" for e in ends)
    return f"[{low}, {high}]"


def _recorded(cell: dict[str, Any], recorded: dict[str, Any]) -> str:
    """Return for `harness bench` a line on the same cell when the bundle was built: ratio to float,
    and machine."""
    if "missing" in recorded:
        return f"ratio to float when built: unknown: {recorded['missing']}"
    shape = (cell["batch"], cell["sequence"])
    old = next((c for c in recorded["cells"] if (c["batch"], c["sequence"]) == shape), None)
    if old is None:
        return "ratio to float when built: this shape was not measured"
    machine = recorded["machine"]
    threads = recorded["threads"] or machine.get("cores", "?")
    where = (
        f"measured when built on {machine.get('cpu') or 'an unnamed machine'}, {threads} threads"
    )
    ratio = old["ratio"]
    if not ratio:
        return f"p50 {old['p50']:.2f}, no ratio to float ({where})"
    name = ratio.get("to", "float")
    return f"{ratio['median']:.2f} {_interval(ratio['interval'])} of {name}'s time ({where})"


def format_generation(document: dict[str, Any]) -> str:
    """Format for `harness bench` the document of measure_generation as text, at most 100 columns
    wide."""
    lines = list[str]()
    for cell in document["cells"]:
        system = cell["systems"]["candidate"]
        lines += [
            "",
            f"batch {cell['batch']}, prompt {cell['prompt']}, {cell['new_tokens']} new tokens, "
            f"{cell['runs']} rounds",
            _generation_row("first token", system["ttft"]),
            _generation_row("next token", system["inter_token"]),
            *(
                f"    up to {b['up_to']:>6} tokens of context   p50 {b['p50']:.2f}"
                for b in system["by_context"]
            ),
            f"  prompt {system['prefill_tokens_per_second']:.0f} tokens/s, "
            f"new {system['tokens_per_second']:.1f} tokens/s",
            f"  {_generation_recorded(cell, document['recorded'])}",
        ]
    return _framed(document, lines)


def _generation_row(name: str, figures: dict[str, Any]) -> str:
    parts = [
        f"{p} {figures[p]:.2f} {_interval(figures[f'{p}_interval'])}" for p in ("p50", "p95", "p99")
    ]
    return f"  {name:<12} {'   '.join(parts)}"


def _generation_recorded(cell: dict[str, Any], recorded: dict[str, Any]) -> str:
    """Write a line that compares a cell with the same cell when the bundle was built: its ratio to
    float."""
    if "missing" in recorded:
        return f"ratio to float when built: unknown: {recorded['missing']}"
    shape = (cell["batch"], cell["prompt"])
    old = next((c for c in recorded["cells"] if (c["batch"], c.get("prompt")) == shape), None)
    if old is None or not old.get("ratio"):
        return "ratio to float when built: this shape was not measured"
    ratio = old["ratio"]
    return (
        f"when built: {ratio['ttft']['median']:.2f} of {ratio['to']}'s time to the first token, "
        f"{ratio['inter_token']['median']:.2f} per next token"
    )
