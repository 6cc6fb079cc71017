"""Take the integers that a quantized checkpoint came with, as the load stage read them."""

from __future__ import annotations

from pathlib import Path

from optimizer.compress import module_rows
from optimizer.compress.module_rows import Row, label
from optimizer.foundation import state
from optimizer.foundation.errors import RecipeError


def take(source: Path, out: Path) -> None:
    """source: what load wrote. Raises RecipeError for a checkpoint that is not quantized."""
    quantized = source / "quantized"
    if not quantized.is_dir():
        raise RecipeError(
            "the checkpoint is not quantized, so there are no codes to take",
            where="quantize.method",
            accepted="pass_through, for a folder in GPTQ, AWQ or compressed-tensors format",
            fix="Use method: rtn, gptq or another that chooses codes.",
        )
    state.write(state.read(quantized), out)
    kept = state.read(out)
    rows = [
        Row(name.removesuffix(".weight"), label(q.scheme, kept.activations), note="kept")
        for name, q in kept.weights.items()
    ]
    module_rows.write(rows, out)
