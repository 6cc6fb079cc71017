"""Simulated searches with known truth."""
