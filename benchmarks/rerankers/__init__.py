"""Benchmarks of rerankers on a CPU."""
