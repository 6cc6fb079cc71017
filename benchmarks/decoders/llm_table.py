"""Page of Markdown of llm_decode.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.decoders.gguf_quality import interval
from benchmarks.measure.results import table, with_interval
from optimizer.harness.bundle.bench import percentile, percentile_interval

HEADING = """\
# INT4 decoding on a CPU

Made by `python -m benchmarks.decoders.llm_decode`. Batch 1, greedy, after a prompt of 128 tokens;
{clock} time, median over {rounds} rounds [95 % interval]. "ours / it" is the time of ours divided
by this system's in the same round: below 1 ours is faster. Bandwidth: bytes of weights that a token
reads, times tokens a second, over what this machine's memory reads in a plain loop. dNLL: nats per
token above float [95 %, paired over {windows} windows of 512 tokens that calibration did not see],
each computed by the runtime that is timed.
"""
HEADS = [
    "system", "dNLL", "weights, MB", "ms per token", "tokens/s", "faster than float", "ours / it",
    "bandwidth", "prompt of 128, ms", "prompt of 512, ms",
]  # fmt: skip
FLOAT = "float"
PREFILLS = ("prefill 128", "prefill 512")


def markdown(result: Mapping[str, Any]) -> str:
    """Format a table and a verdict per thread count, then machine and versions."""
    lines = [HEADING.format(**result)]
    for threads, cell in result["cells"].items():
        lines.append(f"\n## {threads} thread{'s' * (threads != '1')}\n")
        losses = {n: _loss(n, result["quality"]) for n in result["systems"]}
        rows = [_row(n, s, cell, losses[n]) for n, s in result["systems"].items()]
        lines += [table(HEADS, rows), "", _verdict(cell, result["systems"])]
    return "\n".join([*lines, "", _where(result), ""])


def _loss(name: str, nats: Mapping[str, Sequence[float]]) -> str:
    """Format the loss above float in nats."""
    if name not in nats or FLOAT not in nats:
        return "–"
    if name == FLOAT:
        return "0"
    pairs = zip(nats[name], nats[FLOAT], strict=True)
    return "{:.4f} [{:.4f}, {:.4f}]".format(*interval([a - b for a, b in pairs]))


def _row(name: str, system: Mapping[str, Any], cell: Mapping[str, Any], loss: str) -> list[str]:
    found = cell["systems"].get(name, {"why": system["why"]})
    if "decode" not in found:
        return [system["title"], loss, found["why"], *["–"] * (len(HEADS) - 3)]
    decode, size = found["decode"], system["weight_bytes"]
    rate = 1000 / decode["median"]
    share = size * rate / (1e9 * cell["memory"]["read"])
    return [
        system["title"],
        loss,
        f"{size / 1e6:.0f}",
        with_interval(decode),
        f"{rate:.0f}",
        with_interval(decode["speedup"]) if "speedup" in decode else "–",
        with_interval(decode["ours"]) if "ours" in decode else "–",
        f"{100 * share:.0f} %",
        *(f"{found[p]['median']:.0f}" for p in PREFILLS),
    ]


def _verdict(cell: Mapping[str, Any], systems: Mapping[str, Any]) -> str:
    """Compare the fastest of ours with the fastest peer."""
    times = {n: s["decode"] for n, s in cell["systems"].items() if "decode" in s and n != FLOAT}
    ours = [n for n in times if n.startswith("ours")]
    peers = [n for n in times if not n.startswith("ours")]
    memory = f"Memory: {cell['memory']['read']} GB/s read, {cell['memory']['copy']} GB/s copied."
    if not peers or not ours:
        return f"No peer ran. {memory}"
    mine, best = (min(names, key=lambda n: times[n]["median"]) for names in (ours, peers))
    pairs = list(zip(times[mine]["all"], times[best]["all"], strict=True))
    ratios = [a / b for a, b in pairs]
    told = {"median": percentile(ratios, 50), "interval": percentile_interval(ratios, 50)}
    return (
        f"Fastest peer: {systems[best]['title']}; fastest of ours: "
        f"{systems[mine]['title'].strip('*')}, {with_interval(told)} of its time. {memory}"
    )


def _where(result: Mapping[str, Any]) -> str:
    m = result["machine"]
    packages = ", ".join(f"{k} {v}" for k, v in sorted(result["packages"].items()))
    loads: Sequence[float] = result["load_average"]
    return (
        f"Measured {result['when']} on {m['cpu']} ({', '.join(m['flags'])}), {m['cores']} "
        f"cores, {m['memory_mib'] / 1024:.0f} GiB, {m['os']}, Python {m['python']}; {packages}. "
        f"Load average before {loads[0]}, after {loads[-1]}."
    )
