"""Draw random inputs of an ONNX graph, to compare two versions of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class DrawnInput:
    """Input of a model that is an ONNX graph, and the values that may be drawn for it.

    shape: sizes of the axes after the first, which is the batch
    low, high: lowest and highest value that is drawn; None: values are normally distributed
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float | None = None
    high: float | None = None


def of_contract(contract: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[DrawnInput, ...]:
    """List the inputs of a model that is an ONNX graph in its contract, with the value ranges in
    the checkpoint's config.json."""
    return tuple(
        DrawnInput(i["name"], i["dtype"], tuple(i["axes"][1:]), *config["ranges"][i["name"]])
        for i in contract["inputs"]
    )


def draw(ports: Sequence[DrawnInput], rows: int, seed: int = 0) -> dict[str, Array]:
    """Draw random inputs of a model that is an ONNX graph, {input: array of `rows` rows}; one seed
    always gives the same arrays."""
    rng = np.random.default_rng(seed)
    return {p.name: _drawn(rng, p, rows) for p in ports}


def _drawn(rng: np.random.Generator, port: DrawnInput, rows: int) -> Array:
    shape = (rows, *port.shape)
    if port.low is None or port.high is None:
        return rng.standard_normal(shape).astype(port.dtype)
    if np.dtype(port.dtype).kind == "f":
        return rng.uniform(port.low, port.high, shape).astype(port.dtype)
    return rng.integers(int(port.low), int(port.high) + 1, shape).astype(port.dtype)
