"""Environments: which version is in production, and its history."""
