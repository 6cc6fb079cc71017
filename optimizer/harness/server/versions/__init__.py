"""Versions of a model, and trials between them."""
