"""Read held-out text as generation does: token by token, with the tokens before in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.decoder import DecoderRunner
from optimizer.harness.tasks.text_generation import build_step_arrays
from optimizer.validate.ledger.distance import Array

ROWS = 4  # windows at once: their logits are (ROWS, tokens, vocabulary) floats


def run_cached(
    runner: DecoderRunner, contract: Contract, windows: Sequence[Array]
) -> Iterator[Array]:
    """Yield the logits (tokens, vocabulary) of each window, computed token by token through the KV
    cache.

    windows: token ids (tokens,), all of one length
    """
    for start in range(0, len(windows), ROWS):
        ids = np.stack(windows[start : start + ROWS])
        reader, mask = runner.decoder(contract, ids.shape[1]), np.ones_like(ids)
        steps = [
            reader.step(build_step_arrays(contract, ids[:, i : i + 1], mask[:, : i + 1]))
            for i in range(ids.shape[1])
        ]
        yield from np.concatenate(steps, 1)
