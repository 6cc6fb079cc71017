"""Benchmarks of servers, of the semantic cache and of the page in a browser."""
