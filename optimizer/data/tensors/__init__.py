"""Rows of arrays, for models that read tensors."""
