"""Caches of answers: exact, and semantic for text generation."""
