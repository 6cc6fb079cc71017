"""Verify a bundle before anything in it runs."""
