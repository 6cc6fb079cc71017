"""Requests that a server has answered: their lengths and rates, and their drift from the data."""
