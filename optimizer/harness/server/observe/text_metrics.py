"""Metrics of text generation under vLLM's names, beside those of metrics.py."""

from __future__ import annotations

from .metrics import Labels, Metrics


class TextMetrics(Metrics):
    """Metrics of one model that generates text."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels)
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
            "semantic_cache_hits_total", "Requests answered from the semantic cache"
        )
        self.semantic_misses = count(
            "semantic_cache_misses_total", "Questions without a similar one"
        )
        self.semantic_skipped = count(
            "semantic_cache_skipped_total",
            "Questions that were not embedded",
        )
        self.next_token = seconds("vllm:inter_token_latency_seconds", "Seconds between two tokens")

    def count_guesses(self, guessed: int, right: int) -> None:
        """Count the guesses of one decode step of one text."""
        self.guessed.add(guessed)
        self.guessed_right.add(right)
