"""Metrics of objects, masks and depths, by image."""
