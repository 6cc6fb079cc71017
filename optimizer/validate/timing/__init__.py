"""Timing of the candidate and its float baselines in turns, in process; the report's `speed`."""
