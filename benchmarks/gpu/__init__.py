"""Benchmarks on one GPU."""
