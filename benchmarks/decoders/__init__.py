"""Benchmarks of language models on a CPU."""
