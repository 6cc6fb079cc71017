"""Metrics of a server, written in Prometheus' text format.

nv_* have Triton's names and meanings, vllm:* vLLM's, and optimize_* are of this server. All are
updated and read on the event loop's thread. prometheus_client cannot write these names
(docs/decisions/0039).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ...bounds import BATCH, SEQUENCE, length_bounds
from .statistics import Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
ROWS = tuple(2.0**octave for octave in range(BATCH.bit_length()))
Labels = Mapping[str, str]


def _labels(labels: Labels) -> str:
    """Format labels of a metric as {name="value",...}; values come from the manifest and this
    package only."""
    escaped = (
        (k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n"))
        for k, v in labels.items()
    )
    text = ",".join(f'{k}="{v}"' for k, v in escaped)
    return f"{{{text}}}" if text else ""


class Counter:
    """Metric of a server: one number per set of labels.

    text: help text
    kind: "counter", which only grows, or "gauge"
    """

    def __init__(self, name: str, text: str, kind: str = "counter") -> None:
        self.name, self.text, self.kind = name, text, kind
        self._values: dict[tuple[tuple[str, str], ...], float] = {}

    def add(self, number: float = 1.0, **labels: str) -> None:
        key = tuple(labels.items())
        self._values[key] = self._values.get(key, 0.0) + number

    def set(self, number: float, **labels: str) -> None:
        self._values[tuple(labels.items())] = number

    def lines(self, labels: Labels) -> list[str]:
        return [
            f"{self.name}{_labels({**labels, **dict(key)})} {value:.17g}"
            for key, value in (self._values or {(): 0.0}).items()
        ]


class Histogram:
    """Metric of a server: histogram of observations, cumulative over `bounds`, with their sum and
    number.

    text: help text
    bounds: upper bounds of the buckets
    """

    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> None:
        self.name, self.text, self.bounds = name, text, bounds
        self._counts, self._sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def lines(self, labels: Labels) -> list[str]:
        lines, below = [], 0
        for bound, count in zip((*self.bounds, None), self._counts, strict=True):
            below += count
            edge = "+Inf" if bound is None else f"{bound:g}"
            lines.append(f"{self.name}_bucket{_labels({**labels, 'le': edge})} {below}")
        lines.append(f"{self.name}_sum{_labels(labels)} {self._sum:.17g}")
        return [*lines, f"{self.name}_count{_labels(labels)} {below}"]


Metric = TypeVar("Metric", Counter, Histogram)


class Metrics:
    """A server's metrics of one version of a bundle.

    labels: labels of every line
    longest: maximum tokens of a row
    statistics: Statistics of each of its models, by name
    """

    def __init__(self, labels: Labels, longest: int = SEQUENCE) -> None:
        self._labels = labels
        self.statistics: defaultdict[str, Statistics] = defaultdict(Statistics)
        self._all: list[Counter | Histogram] = []
        count, seconds = self._counter, self._histogram
        self.success = count("nv_inference_request_success", "Answered requests")
        self.failure = count("nv_inference_request_failure", "Failed requests by reason")
        self.rows = count("nv_inference_count", "Rows that the model has run")
        self.batches = count("nv_inference_exec_count", "Batches that the model has run")
        self.queue_us = count("nv_inference_queue_duration_us", "Microseconds that rows waited")
        self.model_us = count("nv_inference_compute_infer_duration_us", "Microseconds of batches")
        self.pending = count("nv_inference_pending_request_count", "Waiting rows", "gauge")
        self.request = seconds("optimize_request_seconds", "Seconds from a request to its answer")
        self.preprocess = seconds(
            "optimize_request_preprocess_seconds", "Seconds to tokenize a request"
        )
        self.queue = seconds(
            "optimize_request_queue_seconds", "Seconds that a row waited for its batch"
        )
        self.predict = seconds(
            "optimize_request_predict_seconds", "Seconds of a batch in the model"
        )
        self.postprocess = seconds(
            "optimize_request_postprocess_seconds", "Seconds to write an answer"
        )
        self.batch_rows = self._histogram("optimize_batch_rows", "Rows per batch", ROWS)
        self.row_tokens = seconds(
            "optimize_row_tokens",
            "Tokens of each row of answered requests",
            tuple(map(float, length_bounds(longest))),
        )
        self.answers = count("optimize_answers_total", "Answers by label")
        self.rechecked = count(
            "optimize_batch_rechecked_total", "Batches whose rows were run again alone"
        )
        self.unequal = count(
            "optimize_batch_unequal_total", "Rechecked batches whose answers differed"
        )
        self.hits = count("nv_cache_num_hits_per_model", "Requests answered from the cache")
        self.misses = count("nv_cache_num_misses_per_model", "Requests not found in the cache")
        self.trial_compared = count(
            "optimize_trial_compared_total", "Requests that both versions answered"
        )
        self.trial_differing = count(
            "optimize_trial_differing_total", "Compared requests with other answers"
        )
        self.trial_skipped = count(
            "optimize_trial_skipped_total", "Requests that a version had no time for"
        )

    def count_traffic(self, lengths: Sequence[int], answers: Sequence[Any]) -> None:
        """Count in the server's metrics the lengths of an answered request's rows, and the labels
        of its answers."""
        for length in lengths:
            self.row_tokens.observe(length)
        for answer in answers:
            label = answer.get("label") if isinstance(answer, Mapping) else None
            if isinstance(label, str):
                self.answers.add(label=label)

    def lines(self) -> dict[tuple[str, str, str], list[str]]:
        """Return the text of /metrics, {(name, help text, kind): lines} of every metric of a
        server."""
        return {(m.name, m.text, m.kind): m.lines(self._labels) for m in self._all}

    def _counter(self, name: str, text: str, kind: str = "counter") -> Counter:
        return self._add(Counter(name, text, kind))

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
        return self._add(Histogram(name, text, bounds))

    def _add(self, metric: Metric) -> Metric:
        self._all.append(metric)
        return metric


class TextMetrics(Metrics):
    """A server's metrics of one model that generates text."""

    def __init__(self, labels: Labels, context: int = SEQUENCE) -> None:
        super().__init__(labels, context)
        count, seconds = self._counter, self._histogram
        self.running = count("vllm:num_requests_running", "Texts that are being generated", "gauge")
        self.waiting = count("vllm:num_requests_waiting", "Texts that wait for a slot", "gauge")
        self.prompt_tokens = count("vllm:prompt_tokens_total", "Prompt tokens of accepted requests")
        self.tokens = count("vllm:generation_tokens_total", "Generated tokens")
        self.first_token = seconds(
            "vllm:time_to_first_token_seconds",
            "Seconds from acceptance to the first token",
        )
        self.prefix_queries = count(
            "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"
        )
        self.prefix_hits = count(
            "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache"
        )
        self.guessed = count("vllm:spec_decode_num_draft_tokens_total", "Guessed tokens")
        self.guessed_right = count(
            "vllm:spec_decode_num_accepted_tokens_total", "Guessed tokens that the model accepted"
        )
        self.semantic_hits = count(
            "optimize_semantic_cache_hits_total", "Requests answered from the semantic cache"
        )
        self.semantic_misses = count(
            "optimize_semantic_cache_misses_total", "Questions without a similar one"
        )
        self.semantic_skipped = count(
            "optimize_semantic_cache_skipped_total",
            "Questions that were not embedded",
        )
        self.next_token = seconds("vllm:inter_token_latency_seconds", "Seconds between two tokens")

    def count_guesses(self, guessed: int, right: int) -> None:
        """Count the guessed tokens of one text's step, and those that the model accepted."""
        self.guessed.add(guessed)
        self.guessed_right.add(right)


def write_exposition(models: Sequence[Metrics], others: Sequence[Counter] = ()) -> str:
    """Write the text of /metrics; the format demands that lines of one name stand together.

    models: metrics of every version
    others: metrics that belong to no model
    """
    together: dict[tuple[str, str, str], list[str]] = {}
    for metrics in models:
        for metric, lines in metrics.lines().items():
            together.setdefault(metric, []).extend(lines)
    together |= {(m.name, m.text, m.kind): m.lines({}) for m in others}
    text = []
    for (name, meaning, kind), lines in together.items():
        text += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", *lines]
    return "\n".join([*text, ""])
