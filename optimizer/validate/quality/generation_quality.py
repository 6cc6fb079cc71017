"""Measure the quality of text-generation: windows of held-out text through both models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from optimizer.data.datasets import Sample, Window, cut_windows
from optimizer.foundation.progress import bar, say
from optimizer.validate import target_runner, token_counts
from optimizer.validate.decoder import OnnxDecoder, TorchDecoder, compute_logits
from optimizer.validate.gates import Gate
from optimizer.validate.quality import cached, divergence, perplexity
from optimizer.validate.quality.engine_rows import EngineRows
from optimizer.validate.quality.evaluation import FIRST, Judged, Rows
from optimizer.validate.quality.perplexity import Scores
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.token_counts import Counts


def judge_generation(m: RunArtifacts, sets: Rows, seen: EngineRows) -> Judged:
    """Judge text-generation on windows of held-out text: {name of the set: (gates, section of the
    report)}. The section of the first set has `divergence` (divergence.py), and a gate for a KV
    cache that the target rounds.

    sets: held-out texts by name of the set
    seen: checks that receive the runner, the windows and the scores

    The reference model runs in torch; the candidate is the engine where it runs here, else the
    lowered model in ONNX Runtime on seen.device. Raises DataError where the texts fill no window.
    """
    settings = m.section.validate_
    cut = {
        name: cut_windows(rows, m.encoder, m.contract, settings.sequence_length)
        for name, rows in sets.items()
    }
    baseline = TorchDecoder(m.answering_model, m.contract)
    judged: dict[str, tuple[list[Gate], dict[str, Any]]] = {}
    scored: dict[str, tuple[list[Window], Scores]] = {}
    with closing(target_runner.open_candidate(m, seen.device)) as runner:
        seen.check_files(runner)
        candidate = OnnxDecoder(runner, m.contract)
        for name, some in cut.items():
            scores = perplexity.score(
                bar(some, f"validate: {name or 'held-out'} windows"),
                lambda ids: compute_logits(baseline, ids),
                lambda ids: compute_logits(candidate, ids),
            )
            scored[name] = some, scores
            gates, section = perplexity.judge(scores, settings)
            gates += _counted(m, sets[name], scores)
            judged[name] = gates, {**section, "window_tokens": settings.sequence_length}
            if m.section.target.rounds_cache and name == FIRST:
                through_cache = cached.run_cached(runner, m.contract, some)
                shown = bar(through_cache, "validate: windows through the cache", len(some))
                gate, rounded = perplexity.judge_cache(scores, some, shown, settings)
                judged[name][0].append(gate)
                judged[name][1]["kv_cache"] = rounded
        common = divergence.measure(cut[FIRST], baseline, candidate, settings.confidence)
    seen.check_windows(scored)
    judged[FIRST][1]["divergence"] = common
    return judged


def _counted(m: RunArtifacts, rows: Sequence[Sample], scores: perplexity.Scores) -> list[Gate]:
    """Compare the judged tokens with an independent count of the windows of the rows. Return [a
    failed gate] where they differ, else []."""
    sequence_length = m.section.validate_.sequence_length
    judged = Counts(len(scores.added), scores.tokens, scores.digest)
    expected = token_counts.count_predicted(
        rows, m.source / "checkpoint", m.contract, sequence_length
    )
    say(f"validate: perplexity of {judged}; {len(rows):,} texts hold {expected}")
    if judged == expected:
        return []
    message = f"perplexity was computed on {judged}; the windows of the texts hold {expected}"
    return [Gate("quality.counted", "fail", scores.tokens, expected.tokens, None, message)]
