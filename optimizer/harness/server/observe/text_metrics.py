"""What is counted of texts that are continued, under vLLM's names, beside what metrics.py has."""

from __future__ import annotations

from .metrics import Labels, Metrics


class TextMetrics(Metrics):
    """Adds tokens, the time to the first one and between two, and how many texts run and wait."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels)
        count, seconds = self._counter, self._histogram
        self.running = count("vllm:num_requests_running", "Texts that have a slot", "gauge")
        self.waiting = count("vllm:num_requests_waiting", "Texts that wait for one", "gauge")
        self.prompt_tokens = count("vllm:prompt_tokens_total", "Tokens of prompts accepted")
        self.tokens = count("vllm:generation_tokens_total", "Tokens that were sampled")
        self.first_token = seconds(
            "vllm:time_to_first_token_seconds", "From a request's acceptance to its first token"
        )
        self.prefix_queries = count(
            "vllm:prefix_cache_queries_total", "Tokens of prompts, where beginnings are kept"
        )
        self.prefix_hits = count(
            "vllm:prefix_cache_hits_total", "Of those, that were not read again"
        )
        self.guessed = count("vllm:spec_decode_num_draft_tokens_total", "Tokens that were guessed")
        self.guessed_right = count(
            "vllm:spec_decode_num_accepted_tokens_total", "Of those, that the text chose as well"
        )
        self.semantic_hits = count(
            "semantic_cache_hits_total", "Requests with the answer to a question that is alike"
        )
        self.semantic_misses = count("semantic_cache_misses_total", "Questions with none alike")
        self.semantic_skipped = count(
            "semantic_cache_skipped_total", "Questions that the encoder cannot read, or too many"
        )
        self.next_token = seconds("vllm:inter_token_latency_seconds", "Between two tokens")

    def count_guesses(self, guessed: int, right: int) -> None:
        """Of one step of one text."""
        self.guessed.add(guessed)
        self.guessed_right.add(right)
