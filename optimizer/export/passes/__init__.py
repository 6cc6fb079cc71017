"""Passes over the exported graph, one per file."""
