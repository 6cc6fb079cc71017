"""Processes, locks, temporary folders and memory of this machine."""
