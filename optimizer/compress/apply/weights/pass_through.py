"""Copy the integers of a quantized checkpoint, as the load stage read them."""

from __future__ import annotations

from pathlib import Path

from optimizer.compress import module_rows
from optimizer.compress.module_rows import ModuleRow, label
from optimizer.foundation import state
from optimizer.foundation.errors import RecipeError


def take(source: Path, out: Path) -> None:
    """Take over the integers of a checkpoint that was quantized already: copy the state in load's
    folder `source` to `out`, with report rows. Raises RecipeError where the checkpoint is not
    quantized."""
    quantized = source / "quantized"
    if not quantized.is_dir():
        raise RecipeError(
            "the checkpoint is not quantized, so it has no integers to copy",
            where="quantize.method",
            accepted="pass_through, for a folder in GPTQ, AWQ or compressed-tensors format",
            fix="Use method: rtn, gptq or another that chooses integers.",
        )
    state.write(state.read(quantized), out)
    kept = state.read(out)
    rows = [
        ModuleRow(name.removesuffix(".weight"), label(q.scheme, kept.activations), note="kept")
        for name, q in kept.weights.items()
    ]
    module_rows.write(rows, out)
