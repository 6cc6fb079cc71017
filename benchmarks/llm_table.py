"""llm_decode.json as a page of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from encoder_table import table

HEADING = """\
# INT4 decoding on a CPU

Made by `python benchmarks/llm_decode.py`. Batch 1, greedy, after a prompt of 128 tokens; {clock}
time, median over {rounds} rounds [95 % interval]. "ours / it" is the time of ours divided by this
system's in the same round: below 1 ours is faster. Bandwidth: bytes of weights that a token reads,
times tokens a second, over what this machine's memory reads in a plain loop.
"""
HEADS = [
    "system", "weights, MB", "ms per token", "tokens/s", "faster than float", "ours / it",
    "bandwidth", "prompt of 128, ms", "prompt of 512, ms",
]  # fmt: skip
PREFILLS = ("prefill 128", "prefill 512")


def markdown(result: Mapping[str, Any]) -> str:
    """One table per thread count, its verdict, then where it was measured."""
    lines = [HEADING.format(**result)]
    for threads, cell in result["cells"].items():
        lines.append(f"\n## {threads} thread{'s' * (threads != '1')}\n")
        rows = [_row(n, s, cell) for n, s in result["systems"].items()]
        lines += [table(HEADS, rows), "", _verdict(cell, result["systems"])]
    return "\n".join([*lines, "", _where(result), ""])


def _row(name: str, system: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    found = cell["systems"].get(name, {"why": system["why"]})
    if "decode" not in found:
        return [system["title"], found["why"], *["–"] * (len(HEADS) - 2)]
    decode, size = found["decode"], system["weight_bytes"]
    rate = 1000 / decode["median"]
    share = size * rate / (1e9 * cell["memory"]["read"])
    return [
        system["title"],
        f"{size / 1e6:.0f}",
        _with_interval(decode),
        f"{rate:.0f}",
        _with_interval(decode["speedup"]) if "speedup" in decode else "–",
        _with_interval(decode["ours"]) if "ours" in decode else "–",
        f"{100 * share:.0f} %",
        *(f"{found[p]['median']:.0f}" for p in PREFILLS),
    ]


def _with_interval(found: Mapping[str, Any]) -> str:
    low, high = ("?" if b is None else f"{b:.2f}" for b in found["interval"])
    return f"{found['median']:.2f} [{low}, {high}]"


def _verdict(cell: Mapping[str, Any], systems: Mapping[str, Any]) -> str:
    """Ours beside the fastest system that is neither ours nor float."""
    peers = {
        n: s["decode"]
        for n, s in cell["systems"].items()
        if "decode" in s and not n.startswith("ours") and n != "float"
    }
    memory = f"Memory: {cell['memory']['read']} GB/s read, {cell['memory']['copy']} GB/s copied."
    if not peers:
        return f"No peer ran. {memory}"
    best = min(peers, key=lambda n: peers[n]["median"])
    told = _with_interval(peers[best]["ours"]) if "ours" in peers[best] else "?"
    return f"Fastest peer: {systems[best]['title']}; ours takes {told} of its time. {memory}"


def _where(result: Mapping[str, Any]) -> str:
    m = result["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in sorted(result["packages"].items()))
    loads: Sequence[float] = result["load_average"]
    return (
        f"Measured {result['when']} on {m['cpu']} ({', '.join(result['flags'])}), {m['cores']} "
        f"cores, {m['memory_mib'] / 1024:.0f} GiB, {m['os']}, Python {m['python']}; {packages}. "
        f"Load average before {loads[0]}, after {loads[-1]}."
    )
