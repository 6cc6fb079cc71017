"""State of this process and machine that affects results, memory or time."""
