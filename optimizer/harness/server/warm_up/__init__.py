"""Warm-up: shapes, times and exactness, measured before the first request."""
