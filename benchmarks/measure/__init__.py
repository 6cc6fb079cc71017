"""Measuring systems in processes that take turns, and tables of results."""
