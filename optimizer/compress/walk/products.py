"""What products are computed in under `precision: auto`: float32, or bf16 where that is faster.

An instruction for bf16 says little: AMX is several times faster than float32, AVX-512's dot
products took twice its time in one build of torch. So both are timed, in turn, on what is about to
be computed, and bf16 is taken where its slowest was faster than float32's fastest.
progress/products.json keeps what was taken: a killed run goes on in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimizer.foundation import atomic
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.checkpoint import read_json

FILE = "products.json"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMED = 3  # in each, after one that warms up
ROWS = 512  # of a product that is timed: enough that a processor is busy with multiplying

Seconds = Mapping[str, list[float]]
"""{precision: of each that was timed}"""


@dataclass(frozen=True)
class Products:
    """precision: fp32 or bf16. seconds: empty where there was no choice."""

    precision: str
    seconds: Seconds

    @property
    def dtype(self) -> torch.dtype:
        return TYPES[self.precision]


def in_turn(compute: Callable[[torch.dtype], None]) -> dict[str, list[float]]:
    """How long `compute` takes in each type."""
    seconds: dict[str, list[float]] = {name: [] for name in TYPES}
    for _ in range(1 + TIMED):
        for name, dtype in TYPES.items():
            start = time.perf_counter()
            compute(dtype)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def bf16_is_faster(seconds: Seconds) -> bool:
    return max(seconds["bf16"]) < min(seconds["fp32"])


def kept(progress: Path) -> Products | None:
    """What a run before this one took."""
    file = progress / FILE
    return Products(**read_json(file)) if file.is_file() else None


def keep(products: Products, progress: Path, what: str) -> None:
    """what: was timed, for the message that says so."""
    atomic.write(progress / FILE, json.dumps(asdict(products)).encode())
    fp32, bf16 = (1000 * min(products.seconds[name]) for name in ("fp32", "bf16"))
    say(
        f"{what} takes {fp32:.3g} ms in fp32 and {bf16:.3g} ms in bf16; products are in "
        f"{products.precision}"
    )


def of_linear(precision: str, shape: tuple[int, int], progress: Path, step: str) -> Products:
    """For what is mostly products of linears. precision: fp32, bf16, or auto: decided by one of
    `shape` (out, in), the widest. step: whose progress it is."""
    if precision != "auto":
        return Products(precision, {})
    known = kept(progress)
    if known is not None:
        return known
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(n, shape[1], generator=generator) for n in (ROWS, shape[0]))

    def multiply(dtype: torch.dtype) -> None:
        torch.nn.functional.linear(inputs.to(dtype), weight.to(dtype))

    seconds = in_turn(multiply)
    products = Products("bf16" if bf16_is_faster(seconds) else "fp32", seconds)
    keep(products, progress, f"{step}: the widest product of {ROWS} tokens")
    return products
