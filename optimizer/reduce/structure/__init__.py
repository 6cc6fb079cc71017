"""Choosing and leaving out blocks, neurons, heads and hidden channels."""
