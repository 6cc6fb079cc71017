"""The quality section of text-generation: windows of held-out text through both models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from optimizer.data.datasets import Sample, Window, windows
from optimizer.foundation.progress import bar, say
from optimizer.validate import target_runner, token_counts
from optimizer.validate.decoder import OnnxDecoder, TorchDecoder, logits_of
from optimizer.validate.gates import Gate
from optimizer.validate.quality import cached, divergence, perplexity
from optimizer.validate.quality.engine_rows import EngineRows
from optimizer.validate.quality.evaluation import FIRST, Judged, Rows
from optimizer.validate.quality.perplexity import Scores
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.token_counts import Counts


def quality(m: RunArtifacts, sets: Rows, seen: EngineRows) -> Judged:
    """Of each set the gates and the report's section (perplexity.judge), the first set's with
    `divergence` (divergence.py).

    sets: held-out texts. seen: learns what answered, and for which windows. The source model runs
    in torch, the candidate in ONNX Runtime on seen.device, or the engine where there is one that
    runs here. Raises DataError when the texts do
    not fill a window. A cache that the target rounds has a gate of its own on the first set.
    """
    settings = m.section.validate_
    cut = {
        name: windows(rows, m.encoder, m.contract, settings.sequence_length)
        for name, rows in sets.items()
    }
    baseline = TorchDecoder(m.reference_model, m.contract)
    judged: dict[str, tuple[list[Gate], dict[str, Any]]] = {}
    scored: dict[str, tuple[list[Window], Scores]] = {}
    with closing(target_runner.open_candidate(m, seen.device)) as runner:
        seen.opened(runner)
        candidate = OnnxDecoder(runner, m.contract)
        for name, some in cut.items():
            scores = perplexity.score(
                bar(some, f"validate: {name or 'held-out'} windows"),
                lambda ids: logits_of(baseline, ids),
                lambda ids: logits_of(candidate, ids),
            )
            scored[name] = some, scores
            gates, section = perplexity.judge(scores, settings)
            gates += _counted(m, sets[name], scores)
            judged[name] = gates, {**section, "window_tokens": settings.sequence_length}
            if m.section.target.rounds_cache and name == FIRST:
                read = cached.logits(runner, m.contract, some)
                shown = bar(read, "validate: windows through the cache", len(some))
                gate, rounded = perplexity.through_cache(scores, some, shown, settings)
                judged[name][0].append(gate)
                judged[name][1]["kv_cache"] = rounded
        common = divergence.measure(cut[FIRST], baseline, candidate, settings.confidence)
    seen.decoders(scored)
    judged[FIRST][1]["divergence"] = common
    return judged


def _counted(m: RunArtifacts, rows: Sequence[Sample], scores: perplexity.Scores) -> list[Gate]:
    """A gate that fails where other tokens were judged than the windows of the rows hold."""
    length = m.section.validate_.sequence_length
    judged = Counts(len(scores.added), scores.tokens, scores.digest)
    expected = token_counts.predicted(rows, m.source / "checkpoint", m.contract, length)
    say(f"validate: perplexity of {judged}; {len(rows):,} texts make {expected}")
    if judged == expected:
        return []
    message = f"perplexity was taken of {judged}; the windows of the texts hold {expected}"
    return [Gate("quality.counted", "fail", scores.tokens, expected.tokens, None, message)]
