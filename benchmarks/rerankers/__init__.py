"""Benchmarks of encoders on a CPU."""
