"""Benchmarks of image models on a CPU."""
