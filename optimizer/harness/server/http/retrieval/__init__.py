"""Paths of embeddings and rankings, in the forms of other services."""
