"""Limits that are derived, or measured in the same run."""
