"""Is what was written the user's model? Judged by transformers' own reader, parameter by parameter.

Every later stage, the baseline included, starts from the copy that load wrote. A mistake in making
it (two tensors swapped, a wrong prefix) would therefore be compared with itself and never show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from optimizer.errors import OptimizeError
from optimizer.load.model import auto_class
from optimizer.recipe import Model


def check(folder: Path, section: Model, written: Mapping[str, Tensor]) -> None:
    """Compare `written` (names as in the model's state) with what transformers reads from the
    source's own `folder`. Memory: the model once.

    Raises OptimizeError naming the first parameter that is missing or differs: that is a fault
    here, not in the checkpoint.
    """
    theirs = auto_class(section.task).from_pretrained(
        folder,
        attn_implementation="eager",
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=section.trust_remote_code,
    )
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    for name in written:
        if name not in parameters:
            raise OptimizeError(
                f"{name} was written, and transformers reads no such parameter", where=str(folder)
            )
        if not torch.equal(parameters[name].detach().float(), written[name].float()):
            raise OptimizeError(
                f"{name} was written with other values than transformers reads from the source",
                where=str(folder),
            )
