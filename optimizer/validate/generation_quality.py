"""The quality section of text-generation: windows of held-out text through both models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from optimizer.load.datasets import Sample, windows
from optimizer.progress import bar
from optimizer.validate import divergence, on_gpu, perplexity
from optimizer.validate.decoder import OnnxDecoder, TorchDecoder, logits_of
from optimizer.validate.gates import Gate
from optimizer.validate.materials import Materials


def quality(m: Materials, rows: Sequence[Sample], device: str) -> tuple[list[Gate], dict[str, Any]]:
    """The gates and the report's section (perplexity.judge), with `divergence` (divergence.py).

    rows: held-out texts. The source model runs in torch, the candidate in ONNX Runtime on
    `device`, or the engine where there is one that runs here. Raises DataError when the texts do
    not fill a window.
    """
    wanted = m.section.validate_
    cut = windows(rows, m.tokenizer, m.contract, wanted.sequence_length)
    baseline = TorchDecoder(m.float_model, m.contract)
    with closing(on_gpu.candidate(m, device)) as runner:
        candidate = OnnxDecoder(runner, m.contract)
        scores = perplexity.score(
            bar(cut, "validate: held-out windows"),
            lambda ids: logits_of(baseline, ids),
            lambda ids: logits_of(candidate, ids),
        )
        common = divergence.measure(cut, baseline, candidate, wanted.confidence)
    gates, section = perplexity.judge(scores, wanted)
    section["window_tokens"] = wanted.sequence_length
    section["divergence"] = common
    return gates, section
