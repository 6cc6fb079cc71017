"""Servers, semantic caches and pages in a browser."""
