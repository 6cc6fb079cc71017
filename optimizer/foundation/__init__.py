"""Errors, files, and the values that a model is compressed to."""
