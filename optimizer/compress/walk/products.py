"""Choose the type of products for `precision: auto`: float32, or bf16 where it is faster.

Support for bf16 does not imply speed: AMX is several times faster than float32, but AVX-512's dot
products took twice its time in one build of torch. So both are timed in turns on the real shape,
and bf16 is chosen where its slowest run beats float32's fastest. progress/products.json stores the
choice for a run that is resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from optimizer.foundation import atomic
from optimizer.foundation.process.torch_device import CPU, wait_for_device
from optimizer.foundation.progress import say
from optimizer.model.checkpoint.checkpoint import read_json

FILE = "products.json"
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TIMED = 3  # timed runs of each type, after one warm-up
ROWS = 512  # rows of the timed product, enough to be bound by multiplication

Seconds = Mapping[str, list[float]]
"""{precision: seconds of each timed run}"""


@dataclass(frozen=True)
class ProductSettings:
    """Float type of the walk's matrix products, fp32 or bf16, and the times by which it was chosen;
    without timing, `seconds` is empty."""

    precision: str
    seconds: Seconds

    @property
    def dtype(self) -> torch.dtype:
        """The torch type of the precision."""
        return TYPES[self.precision]


def time_in_turns(compute: Callable[[torch.dtype], None]) -> dict[str, list[float]]:
    """Call `compute`, a product of the walk, with each dtype in turns; returns {precision: seconds
    of TIMED runs}."""
    seconds: dict[str, list[float]] = {name: [] for name in TYPES}
    for _ in range(1 + TIMED):
        for name, dtype in TYPES.items():
            start = time.perf_counter()
            compute(dtype)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def bf16_is_faster(seconds: Seconds) -> bool:
    return max(seconds["bf16"]) < min(seconds["fp32"])


def read_choice(progress: Path) -> ProductSettings | None:
    """Read the float type of products that an earlier, killed run stored in the folder `progress`,
    or None."""
    file = progress / FILE
    return ProductSettings(**read_json(file)) if file.is_file() else None


def store_choice(products: ProductSettings, progress: Path, what: str) -> None:
    """Store the choice of the walk's float type in `progress`, and print the fastest run of each
    type.

    what: name of the timed product
    """
    atomic.write(progress / FILE, json.dumps(asdict(products)).encode())
    fp32, bf16 = (1000 * min(products.seconds[name]) for name in ("fp32", "bf16"))
    say(
        f"{what} takes {fp32:.3g} ms in fp32 and {bf16:.3g} ms in bf16; products are in "
        f"{products.precision}"
    )


def choose(
    precision: str,
    shape: tuple[int, int],
    progress: Path,
    step: str,
    device: torch.device = CPU,
) -> ProductSettings:
    """Choose the precision of the walk's linears: an earlier run's choice in `progress`, else by
    timing.

    precision: fp32, bf16, or auto: timed
    shape: (out, in) of the timed product, the widest
    step: name of the step in the message
    device: device of the products
    """
    if precision != "auto":
        return ProductSettings(precision, {})
    earlier = read_choice(progress)
    if earlier is not None:
        return earlier
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (
        torch.randn(n, shape[1], generator=generator).to(device) for n in (ROWS, shape[0])
    )

    def multiply(dtype: torch.dtype) -> None:
        torch.nn.functional.linear(inputs.to(dtype), weight.to(dtype))
        wait_for_device(device)

    seconds = time_in_turns(multiply)
    products = ProductSettings("bf16" if bf16_is_faster(seconds) else "fp32", seconds)
    store_choice(products, progress, f"{step}: the widest product of {ROWS} tokens")
    return products
