"""Encoders on a CPU."""
