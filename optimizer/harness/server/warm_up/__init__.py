"""Warm-up before the first request: latency, and whether sharing a batch changes answers."""
