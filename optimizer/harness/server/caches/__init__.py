"""Caches of answers, exact and semantic."""
