"""Timing of several systems in turns, in one process."""
